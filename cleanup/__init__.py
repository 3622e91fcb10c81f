"""How it is paid: the claim engine, one handler per kind of obligation, Celery tasks, the beat, and the commands."""
