from django.apps import AppConfig


class CleanupConfig(AppConfig):
    name = "cleanup"
    verbose_name = "Cleanup"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from cleanup import tasks  # noqa: F401 - connects the drain hint, also in processes that are not workers
