"""The service's folder: one owner, whole checkpoints whatever breaks, and a clock of its own."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from retrain.errors import ConfigError
from retrain.service import store as module
from retrain.service.errors import ServiceError
from retrain.service.serve import main
from retrain.service.store import CheckpointPlace, CheckpointStore, Saved
from retrain.service.tuning import Tuning
from retrain.supervision.locks import FolderLock
from tests.service_kit import in_process

PLACE = CheckpointPlace("m", "weights", "one")
TTL = 3600.0
YEARS = 30 * 365 * 86400.0
OPERATIONS = "open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync"


class Killed(BaseException):
    """The process ends here: nothing cleans up, since every later operation fails too."""


@pytest.fixture
def store(tmp_path):
    opened = CheckpointStore(tmp_path).open()
    yield opened
    opened.close()


def save(store, steps, place=PLACE, *, overwrite=False, **fields):
    saved = Saved(place, "tiny", Tuning(rank=4), steps, optimizer=True, **fields)
    state = {"x": torch.full((3,), steps)}
    return store.save(saved, {"x": torch.full((3,), float(steps))}, state, overwrite=overwrite)


@contextmanager
def killed_at(count):
    """Raise at file operation number `count` and at all later ones; yields those that ran."""
    ran = []

    def kill_or(name, real):
        def operation(*args, **kwargs):
            if len(ran) >= count:
                raise Killed
            ran.append(name)
            return real(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, kill_or(name, getattr(os, name)))
        yield ran


ACTIONS = {
    "overwrite": lambda store: save(store, 2, overwrite=True),
    "delete": lambda store: store.delete(PLACE),
    "expire": lambda store: store.expire_at(PLACE, TTL),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_kill_between_any_two_file_operations_loses_at_most_the_new_one(action, tmp_path):
    seen, steps = set(), {"overwrite": {1, 2}, "delete": {1, None}, "expire": {1}}
    for count in range(100):
        folder = tmp_path / str(count)
        store = CheckpointStore(folder).open()
        save(store, 1)
        with killed_at(count) as ran, suppress(Killed):
            ACTIONS[action](store)
        store.close()
        store = CheckpointStore(folder).open()
        left = {path.name for path in folder.iterdir()} | {p.name for p in folder.glob("m/*/*")}
        store.close()
        found = {saved.steps for saved in store.list()} or {None}
        assert left - {"one"} == {".lock", "m"}, count
        assert found <= steps[action], count
        if found != {None}:
            weights, state = store.load(PLACE, optimizer=True)
            assert {float(weights["x"][0]), float(state["x"][0])} == found, count
        seen |= found
        if len(ran) < count:
            break
    assert seen == steps[action]
    assert count > 5


def test_a_save_that_is_done_is_on_the_disk(store, monkeypatch):
    synced, at_rename, fsync, rename = set(), [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda *a: (at_rename.append(set(synced)), rename(*a)))
    save(store, 1)
    folder = store.folder / "m/weights/one"
    assert {path.stat().st_ino for path in (folder, *folder.iterdir())} <= at_rename[-1]
    assert {path.stat().st_ino for path in list(folder.parents)[:3]} <= synced
    store.expire_at(PLACE, TTL)
    assert (folder / "manifest.json").stat().st_ino in synced


def test_a_network_disk_that_can_not_sync_folders_is_good_enough(store, monkeypatch):
    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode) or broken:
            raise OSError(errno.EINVAL, "Invalid argument")

    broken = False
    monkeypatch.setattr(os, "fsync", fsync)
    saved = save(store, 1)
    assert store.list() == [saved]
    broken = True
    with pytest.raises(OSError, match="Invalid argument"):
        save(store, 2, overwrite=True)
    assert [saved.steps for saved in store.list()] == [1]


BROKEN = {
    "empty": "",
    "cut": '{"place": ["m", "we',
    "deep": "[" * 100_000,
    "half": '{"steps": 1}',
    "types": {"steps": "many"},
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_manifest_hides_that_checkpoint_alone(text, store, caplog):
    bad, good = CheckpointPlace("m", "weights", "bad"), save(store, 1)
    manifest = store.folder / "m/weights/bad/manifest.json"
    save(store, 2, bad)
    whole = json.loads(manifest.read_text())
    manifest.write_text(text if isinstance(text, str) else json.dumps(whole | text))
    for _ in range(2):
        store.sweep(unlisted=True)
        assert store.list() == [good]
        with pytest.raises(ServiceError):
            store.find(bad)
    [line] = caplog.messages
    assert line.startswith(f"skipping a checkpoint: {manifest} can't be read: ")
    with pytest.raises(ServiceError):
        save(store, 3, bad)
    store.delete(bad)
    assert save(store, 3, bad) in store.list()


def test_a_manifest_is_read_where_it_is_found(store):
    """A folder may be renamed, and a later version may add fields."""
    save(store, 1)
    (store.folder / "m").rename(store.folder / "m2+train+0")
    manifest = store.folder / "m2+train+0/weights/one/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"later": 1}))
    [saved] = store.list()
    assert saved.place == CheckpointPlace("m2:train:0", "weights", "one")


def test_of_two_saves_of_one_name_one_is_refused(store, monkeypatch):
    both, real = threading.Barrier(2), module.save_file
    monkeypatch.setattr(module, "save_file", lambda *args: (both.wait(10), real(*args)))
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(save, store, steps) for steps in (1, 2)]
    errors = [future.exception() for future in done]
    [lost] = [error for error in errors if error]
    assert lost.status == 409
    [saved] = store.list()
    assert store.load(saved.place)[0]["x"][0] == saved.steps == 1 + errors.index(None)


@contextmanager
def again_and_again(act):
    """Call `act` with 1, 2, 3, ... in a thread while the block runs."""
    over = threading.Event()

    def churn():
        for number in itertools.takewhile(lambda _: not over.is_set(), itertools.count(1)):
            act(number)

    with ThreadPoolExecutor(1) as beside:
        churning = beside.submit(churn)
        try:
            yield
        finally:
            over.set()
        churning.result()


def test_a_checkpoint_that_is_replaced_meanwhile_is_read_from_one_save(store):
    save(store, 0)
    with again_and_again(lambda steps: save(store, steps, overwrite=True)):
        for _ in range(100):
            weights, state = store.load(PLACE, optimizer=True)
            assert torch.equal(weights["x"], state["x"].float())


def test_saving_and_deleting_never_disturb_a_look_at_all_checkpoints(store):
    for number in range(40):
        save(store, 1, PLACE._replace(model_id=f"m{number}"))
    busy = PLACE._replace(model_id="busy")
    with again_and_again(lambda steps: store.delete(save(store, steps, busy).place)):
        for _ in range(40):
            assert len(store.list()) in (40, 41)


async def test_a_wall_clock_that_jumps_expires_nothing(tmp_path, monkeypatch):
    async with in_process(tmp_path) as tinker:
        await tinker.start()
        names = []
        for number, years in enumerate((0, YEARS, -YEARS, YEARS)):
            true = time.time()
            monkeypatch.setattr(time, "time", lambda now=true + years: now)
            kept = {"path": f"n{number}", "ttl_seconds": int(TTL)}
            names.append((await tinker.done("save_weights", number + 1, **kept))["path"])
        for path in names:
            await tinker.post("weights_info", {"tinker_path": path})
        later = time.monotonic() + TTL + 1
        with monkeypatch.context() as patch:
            patch.setattr(module.time, "monotonic", lambda: later)
            found = tinker.app.service.store.list()
        assert not found


def test_a_folder_has_one_owner(store, capsys):
    place = save(store, 1, listed=False).place
    with pytest.raises(ConfigError, match=str(os.getpid())):
        CheckpointStore(store.folder).open()
    assert main(["--port", "0", "--folder", str(store.folder)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"in use by process {os.getpid()}" in line
    assert store.find(place)
    store.close()
    FolderLock(store.folder).release()
