#!/usr/bin/env python
"""Django's command line for this project."""

import os
import sys


def main() -> None:
    # A rehearsal of a provider needs none of our servers, so it asks for no address of one.
    settings = "settings_static" if sys.argv[1:2] == ["rehearse"] else "settings"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", f"paperclip_env.{settings}")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        # A wrong setting is the operator's to mend: the sentence says how, a traceback would only hide it.
        sys.exit(f"Not configured: {error}")


if __name__ == "__main__":
    main()
