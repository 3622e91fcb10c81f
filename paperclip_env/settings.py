"""Settings, read from the environment.

Answers for: safe for production unless told otherwise (DEBUG and PLAIN_HTTP are off), and a sentence instead of a guess
when something needed is missing. `compose.yaml` lists the variables of a deployment; `paperclip_env.stack` sets them
for the embedded servers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import environ
from django.core.exceptions import ImproperlyConfigured

env = environ.Env()
BASE_DIR = Path(__file__).resolve().parent.parent


def _required(name: str, why: str) -> str:
    value: str = env.str(name, default="").strip()
    if not value:
        raise ImproperlyConfigured(f"{name} is not set: {why}")
    return value


def _whole_number(name: str, default: int, least: int = 0) -> int:
    text: str = env.str(name, default="").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a whole number, not {text!r}.") from None
    if value < least:
        raise ImproperlyConfigured(f"{name} must be at least {least}, not {value}.")
    return value


def _switch(name: str, *, default: bool) -> bool:
    text: str = env.str(name, default="").strip().lower()
    if text in {"1", "true", "yes", "on"}:
        return True
    if text in {"0", "false", "no", "off"}:
        return False
    if text:
        raise ImproperlyConfigured(f"{name} must be one of 1, 0, true, false, yes, no, on, off; not {text!r}.")
    return default


def _json_object(name: str) -> dict[str, Any]:
    text: str = env.str(name, default="").strip()
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ImproperlyConfigured(f"{name} must be a JSON object, such as {{}}.")  # its text may hold secrets
    return value


# --- Web ------------------------------------------------------------------------------------------------------------

DEBUG = _switch("DEBUG", default=False)

# Served without TLS, as on a developer's own machine. Off, this means: gunicorn stands behind a proxy that ends TLS and
# that sets X-Forwarded-Proto on every request (and removes what a client sent under that name).
PLAIN_HTTP = _switch("PLAIN_HTTP", default=DEBUG)

SECRET_KEY: str = (
    env.str("SECRET_KEY", default="") or "not-a-secret-only-for-debugging"
    if DEBUG
    else _required(
        "SECRET_KEY",
        "it signs sessions and must be at least 50 random characters, the same for all web processes. "
        "(`make up` makes one by itself; DEBUG=1 does without.)",
    )
)
# Also what digests of secrets are compared under (`leases.credentials`), so workers need both like the web does.
SECRET_KEY_FALLBACKS: list[str] = env.list("SECRET_KEY_FALLBACKS", default=[])
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS: list[str] = env.list("CSRF_TRUSTED_ORIGINS", default=[])

SECURE_PROXY_SSL_HEADER = None if PLAIN_HTTP else ("HTTP_X_FORWARDED_PROTO", "https")
SECURE_SSL_REDIRECT = not PLAIN_HTTP
SECURE_HSTS_SECONDS = 0 if PLAIN_HTTP else _whole_number("HSTS_SECONDS", 365 * 24 * 3600)
SECURE_HSTS_INCLUDE_SUBDOMAINS = not PLAIN_HTTP
SECURE_HSTS_PRELOAD = not PLAIN_HTTP
SESSION_COOKIE_SECURE = not PLAIN_HTTP
CSRF_COOKIE_SECURE = not PLAIN_HTTP
X_FRAME_OPTIONS = "DENY"

ROOT_URLCONF = "paperclip_env.urls"
WSGI_APPLICATION = "paperclip_env.wsgi.application"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_beat",
    "leases",
    "cleanup",
]

MIDDLEWARE = [
    "paperclip_env.health.answer_health_checks",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

STATIC_URL = "static/"
STATIC_ROOT = Path(env.str("STATIC_ROOT", default="") or BASE_DIR / ".local" / "static")
STORAGES: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    # Compressed, but under plain names: only the admin's own files are served, and pages render without a manifest.
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}

LANGUAGE_CODE = "en-us"
USE_I18N = False
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- PostgreSQL -----------------------------------------------------------------------------------------------------


def _database(url: str) -> dict[str, Any]:
    """Turn a postgres:// URL into a Django database, with bounds on how long anything may hang."""
    config: dict[str, Any] = env.db_url_config(url)
    if config.get("ENGINE") != "django.db.backends.postgresql" or not config.get("NAME"):
        raise ImproperlyConfigured(
            "DATABASE_URL must look like postgres://USER:PASSWORD@HOST:PORT/NAME; only PostgreSQL is supported."
        )
    session = {
        # A worker that froze inside a transaction must not keep rows locked for the rest of the fleet.
        "idle_in_transaction_session_timeout": _whole_number("DATABASE_IDLE_IN_TRANSACTION_TIMEOUT_MS", 60_000),
        # Transactions here are short (no provider call happens inside one): a long wait is a fault, and is retried
        # later.
        "lock_timeout": _whole_number("DATABASE_LOCK_TIMEOUT_MS", 10_000),
        # Set to 0 for `migrate` and for pruning history, which may rightly take longer.
        "statement_timeout": _whole_number("DATABASE_STATEMENT_TIMEOUT_MS", 60_000),
    }
    bounds: dict[str, Any] = {
        "connect_timeout": 5,
        # A peer that vanished without a word is noticed after about a minute, whether we wait or send.
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 60_000,
        "options": " ".join(f"-c {name}={value}" for name, value in session.items() if value),
        "application_name": env.str("APPLICATION_NAME", default=f"paperclip_env {Path(sys.argv[0]).name}")[:60],
    }
    return {
        **config,
        "OPTIONS": {**bounds, **config.get("OPTIONS", {})},  # what the URL says wins
        # Connections are kept; a web request or a task first checks that the kept one still answers.
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }


DATABASE_URL = _required(
    "DATABASE_URL",
    "give the PostgreSQL database as postgres://USER:PASSWORD@HOST:PORT/NAME. "
    "(`make up`, `make test` and `make demo` start a PostgreSQL of their own when it is unset.)",
)
DATABASES = {"default": _database(DATABASE_URL)}

# A direct address for the beat, where DATABASE_URL goes through a transaction-pooling proxy: LISTEN and session locks
# do not survive one. None: the beat uses DATABASES["default"].
BEAT_DATABASE_URL: str | None = env.str("BEAT_DATABASE_URL", default="").strip() or None

# --- Celery ---------------------------------------------------------------------------------------------------------
# A message is a hint to look at rows; losing, repeating or reordering it changes only speed. Hence: late
# acknowledgement, no results, no long countdowns, and recovery of a lost hint within minutes.

CELERY_BROKER_URL = _required(
    "CELERY_BROKER_URL",
    "give the broker as redis://:PASSWORD@HOST:PORT/0. "
    "(`make up`, `make test` and `make demo` start one of their own when it is unset.)",
)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # a worker outlasts any outage; the beat bounds its own waiting
CELERY_BROKER_CONNECTION_TIMEOUT = 5

# The longest bound on a worker's provider call, in seconds; the shorter bounds of single calls stay. How long a claimed
# row is left to a worker that is not heard of any more must exceed it by far (`manage.py check` compares them).
PAPERCLIP_CALL_SECONDS = _whole_number("PAPERCLIP_CALL_SECONDS", 60, least=5)
# For how long the files of one sandbox may be read and written away, in seconds.
PAPERCLIP_SAVE_SECONDS = _whole_number("PAPERCLIP_SAVE_SECONDS", 300, least=5)

# A sweep pulls for 60 s, and ends within one call bound more, or one saving of files.
_LONGEST_SWEEP_S = 60 + PAPERCLIP_CALL_SECONDS + max(PAPERCLIP_CALL_SECONDS, PAPERCLIP_SAVE_SECONDS) + 20
_VISIBILITY_TIMEOUT_S = _LONGEST_SWEEP_S + 100
if CELERY_BROKER_URL.startswith(("redis://", "rediss://", "redis+socket://", "sentinel://")):
    CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {
        # A hint whose worker was killed is delivered again after this and at most one restore interval. The default
        # hour, with the default throttle, would hide it for up to 62 minutes.
        "visibility_timeout": _VISIBILITY_TIMEOUT_S,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
        # Without these, a publish to a broker that vanished blocks for ever.
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 15,
    }
else:
    CELERY_BROKER_TRANSPORT_OPTIONS = {}

CELERY_TASK_DEFAULT_QUEUE = "paperclip"
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_BACKEND = None
CELERY_RESULT_EXPIRES = None  # also keeps django-celery-beat from scheduling a daily clean-up of results
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TIMEZONE = "UTC"

# The thread pool cannot enforce these two (the provider calls bound themselves); they hold under prefork, and say what
# the visibility timeout has to exceed.
CELERY_TASK_SOFT_TIME_LIMIT = _LONGEST_SWEEP_S
CELERY_TASK_TIME_LIMIT = _LONGEST_SWEEP_S + 40

# A publish gives up after a second or so beyond the socket timeouts: the row it hints at falls due again anyway.
CELERY_TASK_PUBLISH_RETRY = True
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5}

# Threads, because a sweep makes its hundreds of provider calls from threads of its own and a shutdown has to reach it
# inside the process. No ETA limit and no rate limit: both block ready tasks behind those that wait.
CELERY_WORKER_POOL = "threads"
CELERY_WORKER_CONCURRENCY = _whole_number("WORKER_THREADS", 32, least=1)
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False  # sweeps are fenced in the database
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 20
CELERY_WORKER_SEND_TASK_EVENTS = False

# Keep database connections between tasks (three times the tasks per second); read as it stands, without the namespace.
# Only sound together with the task_prerun handler in `paperclip_env.celery`.
CELERY_DB_REUSE_MAX = sys.maxsize

CELERY_BEAT_SCHEDULER = "cleanup.beat:Scheduler"

# --- Paperclip ------------------------------------------------------------------------------------------------------

# How many provider calls one worker process may have in flight at once, over all accounts.
PAPERCLIP_CALLS_IN_FLIGHT = _whole_number("PAPERCLIP_CALLS_IN_FLIGHT", 200, least=1)

# How long a claimed row is left to a worker that is not heard of any more, in seconds.
PAPERCLIP_PROTECTION_SECONDS = _whole_number("PAPERCLIP_PROTECTION_SECONDS", 900, least=10)

# Where the beat keeps what has to survive this database: how far it had been written (`cleanup.outside`). A directory
# of its own host that is not restored together with the database.
PAPERCLIP_STATE_DIR = Path(env.str("PAPERCLIP_STATE_DIR", default="") or BASE_DIR / ".local" / "state")

# Where the saved files of workspaces are kept (`leases.archives`): a directory that all workers and the web share, or
# any other of Django's file storages, by its class and what that takes.
PAPERCLIP_ARCHIVE_DIR = Path(env.str("PAPERCLIP_ARCHIVE_DIR", default="") or PAPERCLIP_STATE_DIR / "archives")
PAPERCLIP_ARCHIVE_STORAGE: str = (
    env.str("PAPERCLIP_ARCHIVE_STORAGE", default="").strip() or "django.core.files.storage.FileSystemStorage"
)
PAPERCLIP_ARCHIVE_STORAGE_OPTIONS = _json_object("PAPERCLIP_ARCHIVE_STORAGE_OPTIONS")
_IN_A_DIRECTORY = {
    "location": str(PAPERCLIP_ARCHIVE_DIR),
    # A workspace may hold secrets: nobody else on the host reads it.
    "file_permissions_mode": 0o600,
    "directory_permissions_mode": 0o700,
}
STORAGES["workspace_archives"] = {
    "BACKEND": PAPERCLIP_ARCHIVE_STORAGE,
    "OPTIONS": (_IN_A_DIRECTORY if PAPERCLIP_ARCHIVE_STORAGE.endswith("FileSystemStorage") else {})
    | PAPERCLIP_ARCHIVE_STORAGE_OPTIONS,
}
PAPERCLIP_ARCHIVE_MAX_BYTES = _whole_number("PAPERCLIP_ARCHIVE_MAX_BYTES", 2 * 1024 * 1024 * 1024, least=1)

# After how many days `manage.py prune` removes the files of an archive; 0: never.
PAPERCLIP_ARCHIVE_DAYS = _whole_number("PAPERCLIP_ARCHIVE_DAYS", 0)

# --- Logging --------------------------------------------------------------------------------------------------------

LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "()": "paperclip_env.logs.OneLineFormatter",
            "format": "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
            "datefmt": "%Y-%m-%dT%H:%M:%S",
        },
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", default="INFO").upper()},
    "loggers": {
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.server": {"handlers": [], "level": "INFO", "propagate": True},
        # Celery says the outcome of every task twice; ours say it once, with the facts.
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
    },
}
