# Every target makes what it needs by itself, from Python 3.11 or newer and nothing else, in .venv and .local.
#
#   make demo       a tour of the system on servers of its own
#   make test       the tests            (make test ARGS="-k fence -x")
#   make check      the static checks
#   make up         the whole system, until Ctrl-C     (PORT=8010 make up)
#   make clean      remove .venv, .local and every cache; asks nothing, so `make up` loses its data
#   make requirements   write the pinned requirements*.txt again from requirements*.in
#
# PYTHON=/path/to/python3 chooses the Python; DATABASE_URL and CELERY_BROKER_URL, where set, are used instead of the
# embedded servers.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test up check clean requirements ready ready-dev
.NOTPARALLEL:

ARGS ?=
PY := .venv/bin/python
STATIC := DJANGO_SETTINGS_MODULE=paperclip_env.settings_static

# The newest Python on the PATH that is new enough and can make a virtual environment. A version manager's shim may be
# there without a Python behind it, so each is tried.
define find_python
python='$(PYTHON)'; insist=--this-python; \
if [ -z "$$python" ]; then \
    insist=; \
    for candidate in python3.14 python3.13 python3.12 python3.11 python3; do \
        if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
            python="$$candidate"; break; \
        fi; \
    done; \
    python="$${python:-python3}"; \
fi; \
if ! command -v "$$python" >/dev/null 2>&1; then \
    echo "paperclip_env: there is no $$python on the PATH. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 ..." >&2; \
    exit 1; \
fi
endef

help:
	@sed -n 's/^#   //p' Makefile

ready:
	@$(find_python); "$$python" paperclip_env/stack/venv.py $$insist requirements.txt requirements-embedded.txt

ready-dev:
	@$(find_python); "$$python" paperclip_env/stack/venv.py $$insist requirements.txt requirements-embedded.txt requirements-dev.txt

demo: ready
	@$(PY) -m paperclip_env.stack demo $(ARGS)

up: ready
	@$(PY) -m paperclip_env.stack up

test: ready-dev
	@$(PY) -m paperclip_env.stack test $(ARGS)

# makemigrations warns that it cannot compare with a database's history; there is none to compare with.
check: ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()'
	$(STATIC) $(PY) -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run
	DEBUG=0 PLAIN_HTTP=0 SECRET_KEY="$$($(PY) -c 'import secrets; print(secrets.token_urlsafe(64))')" $(STATIC) \
	    $(PY) manage.py check --deploy --fail-level WARNING

clean:
	@if [ -f .local/servers-are-in ]; then rm -rf -- "$$(cat .local/servers-are-in)"; fi
	rm -rf .venv .venv.lock .local .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

requirements: ready-dev
	for name in requirements requirements-embedded requirements-dev; do \
	    $(PY) -m uv pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	        --no-emit-index-url --no-emit-find-links --custom-compile-command 'make requirements' \
	        $$name.in --output-file $$name.txt || exit 1; \
	done
