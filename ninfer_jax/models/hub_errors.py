"""Errors between here and the Hub, as one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ninfer_jax.files import FileError
from ninfer_jax.models.names import HubName


class NoConnection(FileError):
    """The Hub could not be asked; what is in the cache may do."""


@contextmanager
def told(name: HubName, where: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into FileError. where: the Hub's address, or the cache's directory, for messages."""
    from huggingface_hub import constants, errors

    home = constants.ENDPOINT
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise NoConnection(
            f"{name} is not whole in {where}, and HF_HUB_OFFLINE forbids to fetch it: unset that, or name a directory"
        ) from None
    except errors.GatedRepoError:
        raise FileError(
            f"{name} is gated: accept its conditions on {home}/{name.repo}, then `hf auth login`, or HF_TOKEN with a token of "
            "that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileError(
            f"{name}: {home} has no such repository, or it is private: check the spelling, or `hf auth login` (HF_TOKEN); "
            f"./{name.repo} would be a directory"
        ) from None
    except errors.RevisionNotFoundError:
        raise FileError(f"{name}: {name.repo} has no revision {name.revision!r}: name a branch, a tag or a commit of it") from None
    except errors.LocalEntryNotFoundError as error:  # what it makes of a question without an answer, where nothing is kept
        raise _unreachable(name, home, error.__cause__ or error) from None
    except errors.EntryNotFoundError as error:
        raise FileError(f"{name}: a file that {home} lists is not there: {first_line(error)}") from None
    except errors.HfHubHTTPError as error:
        raise _of_status(name, home, error) from None
    except errors.HFValidationError as error:
        raise FileError(f"{name}: {first_line(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FileError(
                f"{name}: the disk of {where} is full: make room there, or set HF_HUB_CACHE to another; what came stays"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise FileError(
                f"{error.filename or where}: {error.strerror}: set HF_HUB_CACHE to a directory that may be written"
            ) from None
        if isinstance(error, ConnectionError | TimeoutError):
            raise _unreachable(name, home, error) from None
        raise FileError(f"{name}: {first_line(error)}") from None
    except Exception as error:
        # Its client's own errors: no host of that name, nobody who listens, silence, a connection that broke too often.
        if type(error).__module__.partition(".")[0].startswith("httpx") or isinstance(error, ConnectionError):
            raise _unreachable(name, home, error) from None
        raise


def _unreachable(name: HubName, home: str, error: BaseException) -> NoConnection:
    return NoConnection(
        f"{name}: {home} cannot be reached ({first_line(error)}): is the network there? HF_ENDPOINT may name a mirror; "
        "what came stays"
    )


def _of_status(name: HubName, home: str, error: Exception) -> FileError:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status == 401:
        return FileError(f"{name}: {home} refuses the token (401): `hf auth login` again, or set HF_TOKEN to one that is valid")
    if status == 403:
        return FileError(f"{name}: {home} forbids it (403): the token's account, or its permissions, do not allow {name.repo}")
    if status == 429:
        return NoConnection(f"{name}: {home} has had too many requests (429): wait some minutes, or log in with `hf auth login`")
    if status >= 500:
        return NoConnection(f"{name}: {home} fails ({status}): try again later, or set HF_ENDPOINT to a mirror; what came stays")
    return FileError(f"{name}: {home} answers {status or 'with an error'}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
