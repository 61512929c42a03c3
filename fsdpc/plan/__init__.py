"""Memory and time of training steps: plans, reports, checks.

No other folder of ``fsdpc`` imports a module of this one. Users call the commands,
``fsdpc.memory_report`` and ``fsdpc.profile_memory``; names of modules in this folder may change.
"""
