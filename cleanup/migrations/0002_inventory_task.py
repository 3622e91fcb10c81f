"""The periodic inventory, there to be enabled: every hour, disabled, and without deleting anything (`delete` is 0).

Nothing here ever enables it again, or changes what an operator made of it.
"""

import json
from typing import Any

from django.db import migrations

NAME = "inventory"


def make(apps: Any, _: Any = None) -> None:
    interval, _made = apps.get_model("django_celery_beat", "IntervalSchedule").objects.get_or_create(
        every=1, period="hours"
    )
    apps.get_model("django_celery_beat", "PeriodicTask").objects.get_or_create(
        name=NAME,
        defaults={
            "task": "cleanup.tasks.inventory",
            "interval": interval,
            "kwargs": json.dumps({"delete": 0}),
            "enabled": False,
            "description": "Lists what the provider accounts hold with our marks. Disabled until you enable it; "
            "deletes nothing unless `delete` says how many leaks a run may have destroyed.",
        },
    )


def remove(apps: Any, _: Any = None) -> None:
    apps.get_model("django_celery_beat", "PeriodicTask").objects.filter(name=NAME).delete()


class Migration(migrations.Migration):
    dependencies = [("cleanup", "0001_schedule_notifies"), ("django_celery_beat", "0019_alter_periodictasks_options")]

    operations = [migrations.RunPython(make, remove)]
