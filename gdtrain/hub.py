"""A folder to the Hugging Face Hub."""

from pathlib import Path

from gdtrain.errors import UserError


def check_push(option: str, repository: str) -> None:
    """Before the work: a name that the Hub accepts, and an account that it knows. Asks the Hub.

    Raises:
        UserError: the name is not accepted, nobody is logged in, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError(f"{repository!r} has no owner")
        HfApi().whoami()
    except HFValidationError as error:
        raise UserError(f"{option}: {error}; accepted: OWNER/NAME") from error
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        raise UserError(f"{option}: the Hub knows no account here; run `hf auth login`, or set HF_TOKEN") from error
    except (OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{option}: the Hub cannot be reached: {error}") from error


def push(option: str, folder: Path, repository: str, message: str) -> str:
    """Upload all files of a folder, into a repository that is made, private, if there is none; returns its address.

    Raises:
        UserError: the Hub refuses, or cannot be reached; the folder is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        address = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"{option}: {repository}: {first}; what was to be uploaded is in {folder}") from error
    return str(address)
