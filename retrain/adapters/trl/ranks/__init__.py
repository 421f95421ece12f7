"""Several processes, the ranks, that train one model together: how they start, meet and end.

Rank 0, the leader, is the process of the run or the service. The others follow: whatever the
leader's trainer is about to do, it sends as an order first and then does it itself, so that all
ranks meet in the same collectives. The face of this package:

- `contract`: `launched()` is this process's `Place` as a launcher such as torchrun set it in the
  environment, or None. `as_place(place)` sets the variables for libraries that read them.
- `crew`: `await Crew.start(size, "module:function", payload, folder=..., lost=...)` starts
  processes 1 to N - 1 on this machine, watches them, and calls `lost(error)` on the event loop when
  one ends by itself. `crew.place` is this process's place, `crew.store` goes to `join`, and `await
  crew.end()` ends them. Each calls `function(place, payload)`, which should `join`, and `follow()`
  until the order is STOP.
- `group`: `join(place, store)` returns `Ranks`, on all ranks at once. The leader calls
  `ranks.lead(name, *args, shares=...)`, a follower `ranks.follow()`, which returns an `Order`. All
  call `ranks.gather(value)`, and `ranks.leave()` at the end. `ALONE` is a group of one process: its
  `lead` does nothing, and its `gather` returns the value in a list.
- `sharding`: `whole_state(model)` and `is_sharded(model)` for FSDP2.

Followers ignore SIGINT, SIGTERM and SIGHUP (`ignore_signals`): the leader decides. A follower whose
leader is gone ends at once.
"""
