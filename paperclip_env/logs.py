"""How a log record becomes one line that carries no password.

Answers for the form only: a record, its traceback included, is one line, and the password in any URL is masked before
it is written. What may be logged at all is each caller's duty.
"""

import logging
import re
import time

# scheme://user:PASSWORD@host and scheme://:PASSWORD@host, as in database and broker addresses.
_PASSWORD_IN_URL = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s@/]+(?=@)", re.IGNORECASE)


class OneLineFormatter(logging.Formatter):
    """Format a record as one line, with its time in UTC."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        text = _PASSWORD_IN_URL.sub(r"\g<before>***", super().format(record))
        return (
            text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
            if "\n" in text or "\r" in text
            else text
        )
