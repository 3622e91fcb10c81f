"""Run the demo: `python -m paperclip_env.demo`, with DATABASE_URL and CELERY_BROKER_URL set."""

from __future__ import annotations

import os
import sys

# A call may take 15 s here instead of 60, and a dead worker's rows are left to it for 40 s instead of 15 min.
os.environ.setdefault("PAPERCLIP_CALL_SECONDS", "15")
os.environ.setdefault("PAPERCLIP_PROTECTION_SECONDS", "40")
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "paperclip_env.settings")
os.environ.setdefault("LOG_LEVEL", "WARNING")

import django

django.setup()

from paperclip_env.demo.story import main  # noqa: E402 - Django comes first

if __name__ == "__main__":
    sys.exit(main())
