"""Settings refuse what is unsafe or missing with one sentence, and hold what the design counts on."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
from celery import signals
from django.conf import settings
from django.db import connection
from django.test import Client

from paperclip_env.celery import app
from paperclip_env.logs import OneLineFormatter

CHECKOUT = Path(__file__).resolve().parents[1]
PRODUCTION = {
    "DATABASE_URL": "postgres://nobody@127.0.0.1:1/nowhere",
    "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
    "SECRET_KEY": "aB3$x" * 20,
    "ALLOWED_HOSTS": "paperclip.example.org",
}


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_deployment_check_finds_nothing_in_production() -> None:
    done = manage("check", "--deploy", "--fail-level", "WARNING", **PRODUCTION)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["DATABASE_URL", "CELERY_BROKER_URL", "SECRET_KEY"])
def test_a_missing_setting_is_a_sentence(name: str) -> None:
    done = manage("check", **{**PRODUCTION, name: ""})
    assert done.returncode != 0
    assert f"{name} is not set" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAPERCLIP_CALLS_IN_FLIGHT", "many"),
        ("PAPERCLIP_CALLS_IN_FLIGHT", "0"),
        ("PAPERCLIP_ARCHIVE_MAX_BYTES", "0"),
        ("PAPERCLIP_ARCHIVE_DAYS", "-1"),
        ("PAPERCLIP_ARCHIVE_STORAGE_OPTIONS", "{"),
        ("PAPERCLIP_ARCHIVE_STORAGE_OPTIONS", "[1]"),
        ("DEBUG", "perhaps"),
        ("DATABASE_URL", "mysql://user@127.0.0.1/name"),
        ("DATABASE_URL", "postgres://user@127.0.0.1"),
    ],
)
def test_a_wrong_setting_is_a_sentence(name: str, value: str) -> None:
    done = manage("check", **{**PRODUCTION, name: value})
    assert done.returncode != 0
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_address_of_the_database_says_wins() -> None:
    code = "from django.conf import settings; print(settings.DATABASES['default']['OPTIONS'])"
    url = "postgres://u:p@127.0.0.1:1/n?connect_timeout=2&sslmode=require"
    done = manage("shell", "--no-imports", "-c", code, **{**PRODUCTION, "DATABASE_URL": url})
    assert "'connect_timeout': 2" in done.stdout, done.stderr
    assert "'sslmode': 'require'" in done.stdout


@pytest.mark.parametrize(
    ("given", "backend", "options"),
    [
        (
            {"PAPERCLIP_STATE_DIR": "/state"},
            "FileSystemStorage",
            "{'location': '/state/archives', 'file_permissions_mode': 384, 'directory_permissions_mode': 448}",
        ),
        (
            {"PAPERCLIP_ARCHIVE_DIR": "/there", "PAPERCLIP_ARCHIVE_STORAGE_OPTIONS": '{"file_permissions_mode": null}'},
            "FileSystemStorage",
            "{'location': '/there', 'file_permissions_mode': None, 'directory_permissions_mode': 448}",
        ),
        (
            {"PAPERCLIP_ARCHIVE_STORAGE": "a.b.Bucket", "PAPERCLIP_ARCHIVE_STORAGE_OPTIONS": '{"use_threads": false}'},
            "Bucket",
            "{'use_threads': False}",
        ),
    ],
)
def test_archives_are_kept_where_the_settings_say(given: dict[str, str], backend: str, options: str) -> None:
    code = "from django.conf import settings; print(settings.STORAGES['workspace_archives'])"
    done = manage("shell", "--no-imports", "-c", code, **{**PRODUCTION, **given})
    assert f"{backend}', 'OPTIONS': {options}}}" in done.stdout, done.stderr


def test_a_hint_becomes_visible_again_only_after_its_task_has_ended() -> None:
    options = app.conf.broker_transport_options
    assert app.conf.task_soft_time_limit < app.conf.task_time_limit < options["visibility_timeout"]


def test_celery_keeps_no_results_and_loses_no_hint_to_a_crash() -> None:
    assert app.conf.task_ignore_result
    assert app.conf.result_backend is None
    assert app.conf.task_acks_late
    assert app.conf.task_reject_on_worker_lost
    assert app.conf.worker_eta_task_limit is None


@pytest.mark.django_db(transaction=True)
def test_a_worker_thread_keeps_its_connection_and_outlives_its_loss() -> None:
    seen: list[int] = []

    def backend() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pid: int = cursor.fetchone()[0]
            return pid

    def three_tasks() -> None:
        for lost_before in (False, False, True):
            if lost_before:
                with psycopg.connect(**parameters, autocommit=True) as other:
                    other.execute("SELECT pg_terminate_backend(%s, 5000)", [seen[-1]])
            signals.task_prerun.send(sender=None)
            seen.append(backend())
        connection.close()

    parameters = {**connection.get_connection_params(), "cursor_factory": psycopg.Cursor, "context": None}
    thread = threading.Thread(target=three_tasks)
    thread.start()
    thread.join(30)
    first, second, third = seen
    assert first == second
    assert third != second


def test_the_health_check_asks_no_database_and_takes_any_host(client: Client) -> None:
    answer = client.get("/healthz", headers={"host": "10.0.0.7:8000"})  # no django_db mark: a query would fail
    assert (answer.status_code, answer.content) == (200, b"ok\n")


def test_the_root_leads_to_the_admin(client: Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/admin/")


def test_the_admin_asks_for_a_login(client: Client) -> None:
    answer = client.get("/admin/login/")
    assert answer.status_code == 200


def test_the_beat_uses_the_main_database_unless_told_otherwise() -> None:
    assert settings.BEAT_DATABASE_URL is None


def test_a_log_record_is_one_line_without_passwords() -> None:
    try:
        raise ValueError("cannot reach postgres://me:hush@db/name\nor redis://:hush@broker/0")  # noqa: TRY301
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed:\n%s", ("https://h/p",), sys.exc_info())
    line = OneLineFormatter("%(levelname)s %(message)s").format(record)
    assert "\n" not in line
    assert "hush" not in line
    assert "postgres://me:***@db/name" in line
    assert "redis://:***@broker/0" in line
    assert "https://h/p" in line
