"""The one exception that the training program shows as a single line instead of a traceback."""


class UserError(Exception):
    """Something the user can put right; the message says what was found and what to do about it."""
