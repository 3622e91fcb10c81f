from django.apps import AppConfig


class CleanupConfig(AppConfig):
    name = "cleanup"
    verbose_name = "Cleanup"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # The tasks connect the drain hint, also in processes that are not workers; the checks register themselves.
        from cleanup import checks, tasks  # noqa: F401
