"""Settings for programs that only read the code: mypy's Django plugin, `makemigrations --check`, `collectstatic`.

Nothing here connects to anything, so the addresses may point nowhere.
"""

import os

os.environ.setdefault("DEBUG", "1")
os.environ.setdefault("DATABASE_URL", "postgres://nobody@127.0.0.1:1/nowhere")
os.environ.setdefault("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")

from paperclip_env.settings import *  # noqa: F403
