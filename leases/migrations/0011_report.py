from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("leases", "0010_inventory")]

    operations = [
        migrations.AddIndex(
            model_name="lease",
            index=models.Index(
                condition=models.Q(("state__in", ["active", "released", "retained", "pending_cleanup"])),
                fields=["id"],
                name="lease_unsettled",
            ),
        ),
    ]
