"""The Celery application, and the two places where Celery's own habits would harm us.

Answers for: every process that imports the project publishes with the project's settings; a worker thread keeps its
database connection from task to task, and a connection that died in between never costs a task; Celery does not replace
the project's logging. What a task does is said in `cleanup.tasks`.
"""

import logging.config
import os
from typing import Any

from celery import Celery, signals

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")

app = Celery("paperclip_env")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@signals.setup_logging.connect(weak=False)
def _keep_the_projects_logging(**_: Any) -> None:
    """A receiver on this signal stops Celery from putting handlers and formats of its own on the root logger."""
    from django.conf import settings

    logging.config.dictConfig(settings.LOGGING)


@signals.task_prerun.connect(weak=False)
def _check_the_kept_connection(task: Any = None, **_: Any) -> None:
    """Let Django drop this thread's connection if it broke since the last task.

    Without it, CELERY_DB_REUSE_MAX would hand a connection whose server went away to every later task of the thread,
    for ever: outside a web request nothing else resets Django's health check.
    """
    if task is not None and getattr(task.request, "is_eager", False):
        return  # the caller's transaction may be open on this connection
    from django.db import close_old_connections

    close_old_connections()
