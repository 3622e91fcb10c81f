"""What the person at the keyboard can mend."""


class Problem(Exception):
    """Stops the launcher; its text is the whole message, so it says what is wrong and what to do."""
