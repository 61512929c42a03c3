"""Memory and time of training steps: plans, reports, checks. The rest of ``fsdpc`` imports none.

For users there are the commands, ``fsdpc.memory_report`` and ``fsdpc.profile_memory``; names of
modules in this folder may change.
"""
