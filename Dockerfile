# One image for web, worker, beat and migrate; compose.yaml says which command each runs.
FROM python:3.13-slim AS packages
RUN python -m venv /venv
COPY requirements.txt .
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.txt

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home --home-dir /nonexistent paperclip
COPY --from=packages /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    DJANGO_SETTINGS_MODULE=paperclip_env.settings STATIC_ROOT=/app-static
WORKDIR /app
COPY . .
# The static files are part of the image; the settings for this step lead nowhere and stay out of it.
RUN python -m compileall -q /app && \
    DJANGO_SETTINGS_MODULE=paperclip_env.settings_static python manage.py collectstatic --noinput --verbosity 0
# What the beat keeps outside the database, and saved workspaces; compose.yaml mounts volumes there.
RUN install -d -o 10001 -g 10001 /state && install -d -m 700 -o 10001 -g 10001 /archives
USER 10001
EXPOSE 8000
CMD ["gunicorn", "paperclip_env.wsgi", "--bind", "0.0.0.0:8000", "--worker-class", "gthread", "--workers", "2", \
     "--threads", "8", "--worker-tmp-dir", "/dev/shm", "--no-control-socket"]
