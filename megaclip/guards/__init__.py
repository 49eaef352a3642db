"""Guards that end a run: at a hang, for a second run in its folder, at a signal, or without its launcher.

- `watchdog`: ends a run that hangs, with the stacks of all threads.
- `lock`: one run per folder.
- `signals`: SIGTERM, SIGINT and SIGUSR1 end a run after its step, and so does the end of its launcher.
"""
