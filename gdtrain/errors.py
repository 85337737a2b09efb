"""The ways a command ends early. Raised where the cause is known, caught only in cli.py."""


class UserError(Exception):
    """A fault the user can mend (config, data, paths, versions): exit code 2.

    The message is all the user sees: it names the file, line or key, and what is accepted.
    """


class TrainingStopped(Exception):
    """The training stopped itself (a loss or gradient that is not finite): exit code 3."""


class Interrupted(Exception):
    """The user pressed Ctrl-C: exit code 130. Typer would end the process on a KeyboardInterrupt without a word."""
