"""Start a session: what describes the processes of an earlier one disappears, and there is a new secret."""

from __future__ import annotations

import shutil

from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret


def begin_session(run_folder: RunFolder) -> None:
    """Make the folders of the session of ``run_folder``, or of a run on this machine, and remove all others.

    A process that remains from an earlier session finds neither its endpoints nor its secret.
    """
    forget_sessions(run_folder)
    for path in run_folder.living():
        path.mkdir(parents=True)
    create_secret(run_folder)
    if run_folder.session:
        write_file(run_folder.session_name, f"{run_folder.session}\n")


def forget_sessions(run_folder: RunFolder) -> None:
    """Remove what describes the processes of any session, of a job or of a run on this machine."""
    here = RunFolder(run_folder.path, "")
    for path in (*here.living(), here.sessions):
        shutil.rmtree(path, ignore_errors=True)
    for file in (here.secret, here.session_name):
        file.unlink(missing_ok=True)
