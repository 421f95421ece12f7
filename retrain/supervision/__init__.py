"""The owner of what user code may do: whoever waits for it keeps the deadline.

- `boundary`: every call of user code; `threads` and `contexts`: calls in a thread or a task apart
- `watch`: what blocks the event loop, and a run without progress; `interrupts`: Ctrl-C
- `leash` and its program `watcher`: end a held interpreter, and child processes
- `children` and `programs`: processes, with their ends and output; `starting`: what takes minutes;
  `crashes`: the error that ended one
- `locks`, `sharing`, `disk`: folders with one owner, counted leases, files that are on the disk
- `outages`, `jsonable`, `loading`: errors that mean an outage, values as JSON, large imports
"""
