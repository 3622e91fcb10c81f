from django.apps import AppConfig


class CleanupConfig(AppConfig):
    name = "cleanup"
    verbose_name = "Cleanup"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # The tasks connect the drain hint, also in processes that are not workers.
        from cleanup import checks, tasks  # noqa: F401

        checks.require_protection_to_exceed_calls()
