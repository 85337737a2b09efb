"""The two ways a command ends early. Raised where the fault is known, caught only in cli.py."""


class UserError(Exception):
    """A fault the user can mend (config, data, paths, versions): exit code 2.

    The message is all the user sees: it names the file, line or key, and what is accepted.
    """


class TrainingStopped(Exception):
    """The training stopped itself (a non-finite loss or gradient, out of memory): exit code 3."""
