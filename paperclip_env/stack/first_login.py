"""The first login of `make up`, made in a process that has Django.

Answers for: the account exists afterwards, and the exit code says whether the given password opens it. An account that
is already there is left as it is, with whatever password its owner chose, unless a reset is asked for.
"""

import os
import sys

USER = "admin"
PASSWORD_VARIABLE = "PAPERCLIP_ADMIN_PASSWORD"  # noqa: S105 -- a name
RESET_VARIABLE = "PAPERCLIP_ADMIN_RESET"
WORKS = 0
CHANGED = 3


def main() -> int:
    import django

    django.setup()
    from django.contrib.auth.models import User

    password = os.environ[PASSWORD_VARIABLE]
    user = User.objects.filter(username=USER).first()
    if user is None:
        user = User.objects.create_superuser(USER, password=password)
    elif os.environ.get(RESET_VARIABLE):
        user.set_password(password)
        user.save(update_fields=["password"])
    return WORKS if user.check_password(password) else CHANGED


if __name__ == "__main__":
    sys.exit(main())
