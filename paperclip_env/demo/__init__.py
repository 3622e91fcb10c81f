"""`make demo`: real sandboxes with real work, torn down under real faults, and an audit that proves nothing was left.

Answers for showing what the system promises on the machine in front of you. The sandboxes are processes (and
containers, when an engine answers), the worker is killed with SIGKILL, the broker is really emptied, and the audit asks
the operating system. Two services that nobody can rent from here are rehearsed: their servers answer from memory, over
HTTP, about sandboxes of real processes. The bounds are shorter than in production, so that it ends within two minutes.
"""
