from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("leases", "0022_continuing")]

    operations = [
        migrations.AlterModelOptions(
            name="archive", options={"permissions": [("download_archive", "Can download archive")]}
        ),
    ]
