"""Several processes, the ranks, that train one model together: how they start, meet and end.

Rank 0, the leader, is the process of the run or the service. The others follow: whatever the
leader's trainer is about to do, it sends as an order first and then does it itself, so that all
ranks meet in the same collectives. `contract` is a process's place, `crew` starts and watches the
followers, `group` sends the orders, `sharding` gathers a divided model.

Followers ignore SIGINT, SIGTERM and SIGHUP: the leader decides. A follower whose leader is gone
ends at once.
"""
