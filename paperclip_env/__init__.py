"""The Django project: settings, the Celery application, URLs and the embedded stack.

Answers for how the parts are put together and run; what the parts do is said in `providers`, `leases` and `cleanup`.
"""

from paperclip_env.celery import app as celery_app

__all__ = ["celery_app"]
