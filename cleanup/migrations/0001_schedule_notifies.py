"""Whoever edits a periodic task wakes the beat: the admin, `QuerySet.update`, raw SQL.

django-celery-beat itself tells of an edit by a Django signal into a table that is polled, which misses the last two.

Row triggers, because a statement that changes no row must not wake anybody; the one channel and the empty payload collapse
within a transaction. The beat writes `last_run_at` and `total_run_count` after every run and `save()` moves `date_changed`
along; those three are left out of the comparison, or it would answer itself for ever. The rest is compared as a whole, so
that a column which a later django-celery-beat adds counts without a change here.

Of a schedule only an update matters: one that was just inserted is nobody's until a task refers to it, and one that a task
refers to cannot be deleted (foreign key).
"""

from django.db import migrations

TASK = "django_celery_beat_periodictask"
SCHEDULES = ("crontab", "interval", "solar", "clocked")

_FORWARD = f"""
CREATE FUNCTION cleanup_notify_schedule() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('paperclip_schedule', '');
    RETURN NULL;
END $$;

CREATE TRIGGER periodictask_made_or_deleted_notifies AFTER INSERT OR DELETE ON {TASK}
    FOR EACH ROW EXECUTE FUNCTION cleanup_notify_schedule();
CREATE TRIGGER periodictask_emptied_notifies AFTER TRUNCATE ON {TASK}
    FOR EACH STATEMENT EXECUTE FUNCTION cleanup_notify_schedule();
CREATE TRIGGER periodictask_edited_notifies AFTER UPDATE ON {TASK}
    FOR EACH ROW WHEN (
        to_jsonb(OLD) - ARRAY['last_run_at', 'total_run_count', 'date_changed']
        IS DISTINCT FROM to_jsonb(NEW) - ARRAY['last_run_at', 'total_run_count', 'date_changed']
    )
    EXECUTE FUNCTION cleanup_notify_schedule();
ALTER TABLE {TASK} ENABLE ALWAYS TRIGGER periodictask_made_or_deleted_notifies;
ALTER TABLE {TASK} ENABLE ALWAYS TRIGGER periodictask_emptied_notifies;
ALTER TABLE {TASK} ENABLE ALWAYS TRIGGER periodictask_edited_notifies;
""" + "".join(
    f"""
CREATE TRIGGER {name}_edited_notifies AFTER UPDATE ON django_celery_beat_{name}schedule
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION cleanup_notify_schedule();
ALTER TABLE django_celery_beat_{name}schedule ENABLE ALWAYS TRIGGER {name}_edited_notifies;
"""
    for name in SCHEDULES
)

_BACKWARD = (
    f"""
DROP TRIGGER periodictask_made_or_deleted_notifies ON {TASK};
DROP TRIGGER periodictask_emptied_notifies ON {TASK};
DROP TRIGGER periodictask_edited_notifies ON {TASK};
"""
    + "".join(f"DROP TRIGGER {name}_edited_notifies ON django_celery_beat_{name}schedule;\n" for name in SCHEDULES)
    + """
DROP FUNCTION cleanup_notify_schedule();
"""
)


class Migration(migrations.Migration):
    dependencies = [("django_celery_beat", "0019_alter_periodictasks_options")]

    operations = [migrations.RunSQL(_FORWARD, _BACKWARD)]
