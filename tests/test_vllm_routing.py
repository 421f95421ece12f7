"""Routing: turns stay with their server, load is spread, and a lost server is forgotten."""

from __future__ import annotations

import random

from retrain.vllm.routing import BLOCK, SPARE, Router


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_the_turns_of_a_rollout_stay_with_their_server() -> None:
    router = Router(4)
    homes = {}
    for rollout in range(40):
        history = prompt(200, rollout)
        homes[rollout] = router.choose(history, range(4))
        for turn in range(5):
            history = history + prompt(150, 1000 * rollout + turn)
            assert router.choose(history, range(4)) == homes[rollout]
    assert set(homes.values()) == {0, 1, 2, 3}


def test_a_system_prompt_that_all_share_binds_none_to_a_server() -> None:
    router, shared = Router(4), prompt(4 * BLOCK, 99)
    chosen = []
    for rollout in range(40):
        server = router.choose(shared + prompt(6 * BLOCK, rollout), range(4))
        router.rows[server] += 8
        chosen.append(server)
    assert [chosen.count(server) for server in range(4)] == [10] * 4


def test_a_preferred_server_that_is_much_more_loaded_is_passed_over() -> None:
    router, history = Router(2), prompt(300)
    home = router.choose(history, range(2))
    router.rows[home] = SPARE
    assert router.choose(history, range(2)) == home
    router.rows[home] = SPARE + 1
    assert router.choose(history, range(2)) == 1 - home
    router.rows[home] = 0
    assert router.choose(history, range(2)) == 1 - home  # which has it in its cache now


def test_equal_servers_take_turns_and_the_least_loaded_wins() -> None:
    router = Router(3)
    assert sorted(router.choose([1, 2, 3], range(3)) for _ in range(3)) == [0, 1, 2]
    router.rows = [5, 4, 9]
    assert {router.choose([1, 2, 3], range(3)) for _ in range(5)} == {1}
    assert router.choose([1, 2, 3], [0, 2]) == 0


def test_a_lost_server_and_old_prompts_are_forgotten() -> None:
    router, history = Router(2, remembered=10), prompt(4 * BLOCK)
    home = router.choose(history, range(2))
    assert router.choose(history, [1 - home]) == 1 - home  # the only one, which is not learned
    router.forget(home)
    router.rows[home] = 1
    assert router.choose(history, range(2)) == 1 - home
    for seed in range(5):
        router.choose(prompt(4 * BLOCK, seed + 1), range(2))
    assert len(router._holders) == 10
