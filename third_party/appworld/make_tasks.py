"""Writes three small handmade tasks as an AppWorld data folder; runs in AppWorld's .venv.

Usage: .venv/bin/python make_tasks.py FOLDER

The apps, their databases and the evaluator are AppWorld's; people, notes and contacts are
fictitious. The folder also contains API docs that AppWorld generates: do not share it.
"""

import gc
import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from appworld import update_root
from appworld.api_docs import prepare_api_docs
from appworld.apps import get_all_apps
from appworld.collections.models import ModelCollection
from appworld.common.constants import DB_VERSION

SUPERVISOR = {
    "first_name": "Ann",
    "last_name": "Lee",
    "email": "ann.lee@example.com",
    "phone_number": "5551234567",
}
PRIVATE = {"birthday": "1990-01-01", "sex": "female"}
PASSWORD = "kettle-drum-7"
NOW = "2023-05-18T12:00:00"
NOTES = {"Shopping": "milk\neggs\nrice", "Ideas": "a kite"}
CONTACTS = {"Dana": "5550001111", "Omar": "5550002222"}

# instruction, answer (JSON), requirements: (text, whether it is met without any action, check).
TASKS = {
    "shopping_1": (
        "How many items are in my note titled Shopping? Then delete that note.",
        "3",
        (
            ("the answer matches.", False, "test.answer(answer, ground_truth_answer)"),
            ("the note is gone.", False, 'test.case("Shopping", "not in", titles)'),
            ("the other note is still there.", True, 'test.case("Ideas", "in", titles)'),
        ),
    ),
    "packing_1": (
        "Write a note titled Packing that says: tent, rope.",
        "null",
        (
            (
                "there is such a note.",
                False,
                'test.case(contents.get("Packing"), "==", "tent, rope")',
            ),
            (
                "no other note has changed.",
                True,
                f"test.case({NOTES!r}.items() <= contents.items(), " == ", True)",
            ),
        ),
    ),
    "contact_1": (
        "What is the phone number of my contact Dana?",
        '"5550001111"',
        (("the answer matches.", False, "test.answer(answer, ground_truth_answer)"),),
    ),
}
DATASETS = {"train": ["shopping_1", "packing_1"], "dev": ["contact_1"]}


def main() -> None:
    gc.disable()  # as in server.py
    root = Path(sys.argv[1]).resolve()
    data = root / "data"
    data.mkdir(parents=True)
    update_root(str(root))
    make_base(data)
    for task_id, task in TASKS.items():
        make_task(data, task_id, *task)
    for name, task_ids in DATASETS.items():
        write(data / "datasets" / f"{name}.txt", "\n".join(task_ids) + "\n")


def make_base(data: Path) -> None:
    """Writes the initial databases of every task, which hold only the API docs, and these docs."""
    apps = get_all_apps(skip_admin=False)
    models = ModelCollection.load(to_db_home_path=":memory:base", load_apps=apps, create_db=True)
    for app in get_all_apps(skip_admin=True):
        docs = prepare_api_docs(app, include_private_apis=False)
        by_name = {doc["api_name"]: {**doc, "canary_string": ""} for doc in docs}
        write_json(data / "api_docs" / "standard" / f"{app}.json", by_name)
        calling = prepare_api_docs(app, include_private_apis=False, format="function_calling")
        write_json(data / "api_docs" / "function_calling" / f"{app}.json", calling)
        for doc in docs:
            row = {key: value for key, value in doc.items() if key != "app_name"}
            models.api_docs.ApiDoc.create_save(app_name_=app, **row)
    save(models, data / "base_dbs", "full")


def make_task(data: Path, task_id: str, instruction: str, answer: str, requirements) -> None:
    folder = data / "tasks" / task_id
    models = ModelCollection.load(
        to_db_home_path=f":memory:{task_id}",
        from_db_home_path=str(data / "base_dbs"),
        load_apps=get_all_apps(skip_admin=False),
    )
    fill(models, instruction)
    save(models, folder / "dbs", "changes")
    specs = {"instruction": instruction, "supervisor": SUPERVISOR, "datetime": NOW}
    write_json(folder / "specs.json", specs | {"db_version": DB_VERSION})
    counts = dict.fromkeys(("num_apps", "num_apis", "num_api_calls", "num_solution_code_lines"), 1)
    labels = {False: "no_op_fail", True: "no_op_pass"}
    parts = {
        "metadata": {"difficulty": 1, "mode": "minimal"} | counts,
        "public_data": {},
        "private_data": {},
        "test_data": [{"requirement": r, "label": labels[idle]} for r, idle, _ in requirements],
    }
    for name, part in parts.items():
        write_json(folder / "ground_truth" / f"{name}.json", part)
    write(folder / "ground_truth" / "answer.json", answer)
    write(folder / "ground_truth" / "evaluation.py", evaluation(requirements))


def fill(models: ModelCollection, instruction: str) -> None:
    """Adds Ann's accounts, notes and contacts, and her task."""
    supervisor = models.supervisor.Supervisor.create_save(**SUPERVISOR, **PRIVATE)
    models.admin.MainUser.create_save(**SUPERVISOR, **PRIVATE)
    for app in ("simple_note", "phone"):
        models.supervisor.AccountPassword.create_save(
            supervisor_id=supervisor.id, account_name=app, password=PASSWORD
        )
    models.supervisor.Task.create_save(supervisor_id=supervisor.id, instruction=instruction)
    name = {"first_name": SUPERVISOR["first_name"], "last_name": SUPERVISOR["last_name"]}
    login = name | {"password": PASSWORD, "verified": True, "last_logged_in": NOW}
    writer = models.simple_note.User.create_save(
        **login, email=SUPERVISOR["email"], registered_at=NOW
    )
    for title, content in NOTES.items():
        models.simple_note.Note.create_save(
            user_id=writer.id, title=title, content=content, created_at=NOW, updated_at=NOW
        )
    caller = models.phone.User.create_save(
        **login, phone_number=SUPERVISOR["phone_number"], created_at=NOW
    )
    for first_name, phone_number in CONTACTS.items():
        models.phone.Contact.create_save(
            user_id=caller.id,
            first_name=first_name,
            last_name="Reed",
            email=f"{first_name.lower()}@example.com",
            phone_number=phone_number,
            created_at=NOW,
        )


def evaluation(requirements) -> str:
    """Returns the source of the module that AppWorld's evaluator calls."""
    lines = """\
        import json


        def evaluate(models, ground_truth_answer, public_data, private_data, main_user, test):
            answer = json.loads(models.end.supervisor.Task.all()[0].answer)
            contents = {note.title: note.content for note in models.end.simple_note.Note.all()}
            titles = list(contents)
    """
    checks = [f"    with test({text!r}):\n        {check}\n" for text, _, check in requirements]
    return dedent(lines) + "".join(checks)


def save(models: ModelCollection, folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    models.save(
        db_home_path=str(folder),
        app_names=get_all_apps(skip_admin=False),
        format=kind,
        delete_if_exists=True,
    )
    models.close()


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
