"""Requests to the file system."""

from __future__ import annotations

from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, Infeasible, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import FILES


def folder_now(draft: Draft) -> Any:
    return draft.simulator(FILES)._current_dir


def _is_folder(item: Any) -> bool:
    return hasattr(item, "contents")


def file_names(folder: Any) -> list[str]:
    """Names of a folder's files that have text."""
    items = folder.contents.items()
    return [name for name, item in items if not _is_folder(item) and item.content]


def _folder_names(folder: Any) -> list[str]:
    return [name for name, item in folder.contents.items() if _is_folder(item)]


def go_somewhere(draft: Draft, files: int = 1) -> str:
    """Stays, or goes to a sub- or parent folder, with at least so many files; returns a phrase."""
    folder = folder_now(draft)
    places = {"..": folder.parent, **{n: folder.contents[n] for n in _folder_names(folder)}}
    fitting = [n for n, f in places.items() if f is not None and len(file_names(f)) >= files]
    if len(file_names(folder)) >= files:
        fitting += [".", "."]
    name = draft.choose(fitting)
    if name == ".":
        return draft.rng.choice(("right where we are", "in the present folder"))
    draft.call("cd", folder=name)
    if name == "..":
        return draft.rng.choice(("one folder up from here", "in the parent folder"))
    return draft.rng.choice((f"inside '{name}'", f"in the '{name}' folder"))


def some_file(draft: Draft) -> str:
    return draft.choose(file_names(folder_now(draft)))


def new_name(draft: Draft) -> str:
    name = f"{draft.choose(words.NEW_STEMS)}.{draft.choose(('txt', 'md'))}"
    if name in folder_now(draft).contents:
        raise Infeasible(name)
    draft.set_fact("file", name)
    return name


def latest_file(draft: Draft) -> str:
    name = draft.fact("file")
    if name not in folder_now(draft).contents:
        raise Infeasible(name)
    return name


def read_file(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name = some_file(draft)
    draft.call("cat", file_name=name)
    return draft.phrase(
        "Open '{name}', which lies {place}, and give me its text.",
        "What does '{name}' say? You will find it {place}.",
        "I need to read '{name}'; it is {place}.",
        partial=(
            "There is a file {place} that I need to read.",
            "Read me a file; it lies {place}.",
        ),
        detail=("It is the one called '{name}'.", "'{name}' is what I am after."),
        name=name,
        place=place,
    )


def count_parts(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, mode = some_file(draft), draft.choose(("l", "w", "c"))
    draft.call("wc", file_name=name, mode=mode)
    return draft.phrase(
        "How many {unit} has '{name}', {place}?",
        "Count the {unit} of '{name}' {place}, please.",
        "Tell me the number of {unit} that '{name}' holds; look {place}.",
        partial="Count the {unit} of a file for me; it lies {place}.",
        detail=("I mean '{name}'.", "Count those of '{name}'."),
        unit={"l": "lines", "w": "words", "c": "characters"}[mode],
        name=name,
        place=place,
    )


def search_lines(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name = some_file(draft)
    text = folder_now(draft).contents[name].content
    pattern = draft.choose([word for word in text.replace(",", " ").split() if len(word) > 3])
    draft.call("grep", file_name=name, pattern=pattern)
    return draft.phrase(
        "Which lines of '{name}' mention '{pattern}'? The file is {place}.",
        "Pull out every line with '{pattern}' from '{name}' {place}.",
        partial="Search '{name}' {place} for a word of mine.",
        detail=("The word is '{pattern}'.", "Look for '{pattern}'."),
        name=name,
        place=place,
        pattern=pattern,
    )


def last_lines(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, lines = some_file(draft), draft.rng.randint(1, 3)
    draft.call("tail", file_name=name, lines=lines)
    return draft.phrase(
        "Show just the final {lines} line(s) of '{name}', {place}.",
        "How does '{name}' end? Its last {lines} line(s) are enough; it sits {place}.",
        "From '{name}' {place} I only want the closing {lines} line(s).",
        partial="Show me only the end of '{name}', {place}; I will say how much.",
        detail="Make that {lines} line(s).",
        name=name,
        place=place,
        lines=lines,
    )


def sort_lines(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name = some_file(draft)
    draft.call("sort", file_name=name)
    return draft.phrase(
        "Give me the lines of '{name}' in alphabetical order; it is {place}.",
        "What would '{name}' {place} look like with sorted lines?",
        "List '{name}' {place} line by line, sorted, without changing it.",
        partial="I would like a file's lines sorted; it is {place}.",
        detail="That file is '{name}'.",
        name=name,
        place=place,
    )


def new_folder(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, folder = some_file(draft), draft.choose(words.NEW_FOLDERS)
    draft.call("mkdir", dir_name=folder)
    draft.call("mv", source=name, destination=folder)
    return draft.phrase(
        "Make a folder '{folder}' {place} and put '{name}' into it.",
        "I want '{name}' out of the way: create '{folder}' {place} and move it there.",
        partial="Make a new folder {place} and move '{name}' in; wait for its name.",
        detail=("Name it '{folder}'.", "The folder is to be called '{folder}'."),
        folder=folder,
        name=name,
        place=place,
    )


def write_note(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, text = new_name(draft), words.sentence(draft.rng)
    draft.call("touch", file_name=name)
    draft.call("echo", content=text, file_name=name)
    return draft.phrase(
        "Start a file '{name}' {place} and write this in it: '{text}'",
        "Put the line '{text}' in a fresh file called '{name}', {place}.",
        "Jot '{text}' down in a new file '{name}' {place}.",
        partial="Start a file '{name}' {place}; I will tell you what goes in.",
        detail=("Write this in it: '{text}'", "Its text should be '{text}'"),
        name=name,
        text=text,
        place=place,
    )


def overwrite(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, text = some_file(draft), words.sentence(draft.rng)
    draft.call("echo", content=text, file_name=name)
    draft.set_fact("file", name)
    return draft.phrase(
        "Replace everything in '{name}', {place}, by '{text}'",
        "'{name}' {place} is outdated. Its whole text should now be '{text}'",
        "Overwrite '{name}' {place} so that it only says '{text}'",
        partial="Replace everything in '{name}', {place}; the text is to follow.",
        detail="The new text: '{text}'",
        name=name,
        text=text,
        place=place,
    )


def copy_file(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, copy = some_file(draft), new_name(draft)
    draft.call("cp", source=name, destination=copy)
    return draft.phrase(
        "Duplicate '{name}' {place} under the name '{copy}'.",
        "Keep a second version of '{name}' next to it, {place}, called '{copy}'.",
        partial="Duplicate '{name}' {place} under another name.",
        detail="Call the duplicate '{copy}'.",
        name=name,
        copy=copy,
        place=place,
    )


def copy_to_folder(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name = some_file(draft)
    folder = draft.choose(_folder_names(folder_now(draft)))
    draft.call("cp", source=name, destination=folder)
    return draft.phrase(
        "Leave a copy of '{name}' in '{folder}'; both are {place}.",
        "'{folder}' should have its own copy of '{name}'. Both lie {place}.",
        partial="Leave a copy of '{name}', which is {place}, in one of the folders beside it.",
        detail="I want it in '{folder}'.",
        name=name,
        folder=folder,
        place=place,
    )


def rename_file(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, new = some_file(draft), new_name(draft)
    draft.call("mv", source=name, destination=new)
    return draft.phrase(
        "'{name}' {place} needs a better name: '{new}'.",
        "Rename '{name}', {place}, into '{new}'.",
        "From now on '{name}' {place} is to be called '{new}'.",
        partial=("'{name}' {place} needs a better name.", "Rename '{name}', {place}."),
        detail=("The new name is '{new}'.", "Let it be '{new}'."),
        name=name,
        new=new,
        place=place,
    )


def move_file(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name = some_file(draft)
    folder = draft.choose(_folder_names(folder_now(draft)))
    draft.call("mv", source=name, destination=folder)
    return draft.phrase(
        "'{name}' belongs in '{folder}'; move it. You find both {place}.",
        "Tidy up {place}: '{name}' goes into '{folder}'.",
        partial="Tidy up {place}: put '{name}' into the right folder.",
        detail="The right one is '{folder}'.",
        name=name,
        folder=folder,
        place=place,
    )


def delete_file(draft: Draft) -> UserMessage:
    place = go_somewhere(draft, files=2)
    name = some_file(draft)
    draft.call("rm", file_name=name)
    return draft.phrase(
        "Nobody needs '{name}' {place} any more; delete it.",
        "Throw '{name}' away. It is {place}.",
        partial="One of the files {place} can be thrown away.",
        detail="'{name}' is the one to delete.",
        name=name,
        place=place,
    )


def compare_files(draft: Draft) -> UserMessage:
    place = go_somewhere(draft, files=2)
    first, second = draft.choose_two(file_names(folder_now(draft)))
    draft.call("diff", file_name1=first, file_name2=second)
    return draft.phrase(
        "Where do '{first}' and '{second}' differ? Both are {place}.",
        "Compare '{first}' with '{second}', {place}, line by line.",
        partial="Compare '{first}', {place}, with another file there.",
        detail="Compare it with '{second}'.",
        first=first,
        second=second,
        place=place,
    )


def disk_usage(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    draft.call("du", human_readable=True)
    return draft.phrase(
        "How much room does everything {place} take up? In units that people can read.",
        "How big is everything {place}, all together? Use a readable unit.",
        place=place,
    )


def find_and_read(draft: Draft) -> UserMessage:
    folder = folder_now(draft)
    where = draft.choose([n for n in _folder_names(folder) if file_names(folder.contents[n])])
    name = draft.choose(file_names(folder.contents[where]))
    draft.call("find", path=".", name=name)
    draft.call("cd", folder=where)
    draft.call("cat", file_name=name)
    return draft.phrase(
        "Somewhere below us there is '{name}'. Search for it from here, go there, read it out.",
        "I lost '{name}'. Find it by its name, starting here, and show me what is in it.",
        partial="I lost a file somewhere below us. Search for it and read it out.",
        detail=("Its name is '{name}'.", "You are looking for '{name}'."),
        name=name,
    )


def save_sorted(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, new = some_file(draft), new_name(draft)
    lines = draft.call("sort", file_name=name)["sorted_content"]
    draft.call("touch", file_name=new)
    draft.call("echo", content=lines, file_name=new)
    return draft.phrase(
        "Sort the lines of '{name}', {place}, and keep the outcome beside it as '{new}'.",
        "I want a sorted version of '{name}' saved as a new file '{new}', {place}.",
        partial="Sort the lines of '{name}', {place}, and save the outcome beside it.",
        detail=("Save it as '{new}'.", "The new file's name is '{new}'."),
        name=name,
        new=new,
        place=place,
    )


def save_last_line(draft: Draft) -> UserMessage:
    place = go_somewhere(draft)
    name, new = some_file(draft), new_name(draft)
    line = draft.call("tail", file_name=name, lines=1)["last_lines"]
    draft.call("touch", file_name=new)
    draft.call("echo", content=line, file_name=new)
    return draft.phrase(
        "Take the very last line of '{name}', {place}, and put it alone in a new file '{new}'.",
        "A new file '{new}' should hold the final line of '{name}'; stay {place}.",
        name=name,
        new=new,
        place=place,
    )


def remove_folder(draft: Draft) -> UserMessage:
    folder = folder_now(draft)
    empty = [n for n in _folder_names(folder) if not folder.contents[n].contents]
    name = draft.choose(empty)
    draft.call("rmdir", dir_name=name)
    return draft.phrase(
        "'{name}' has nothing in it, so take that folder away.",
        "Drop the empty folder '{name}', will you?",
        name=name,
    )


def read_latest(draft: Draft) -> UserMessage:
    draft.call("cat", file_name=latest_file(draft))
    return draft.phrase(
        "Let me see what that file says now.",
        "Show the text of the file from your last step, to be sure.",
    )


def copy_latest(draft: Draft) -> UserMessage:
    name = latest_file(draft)
    copy = new_name(draft)
    draft.call("cp", source=name, destination=copy)
    return draft.phrase(
        "Duplicate that same file as '{copy}'.",
        "That one deserves a copy called '{copy}', in the same place.",
        partial="Duplicate that same file, please.",
        detail=("As '{copy}'.", "The duplicate is called '{copy}'."),
        copy=copy,
    )


def rename_latest(draft: Draft) -> UserMessage:
    name = latest_file(draft)
    new = new_name(draft)
    draft.call("mv", source=name, destination=new)
    return draft.phrase(
        "On second thoughts, call that file '{new}' instead.",
        "That file's name is no good after all; '{new}' is better.",
        partial="On second thoughts, that file should be called something else.",
        detail="Call it '{new}'.",
        new=new,
    )


FILE_REQUESTS = (
    *requests((FILES,), read_file, count_parts, search_lines, last_lines, sort_lines, new_folder),
    *requests((FILES,), write_note, overwrite, copy_file, copy_to_folder, rename_file, move_file),
    *requests((FILES,), delete_file, compare_files, disk_usage, find_and_read, save_sorted),
    *requests((FILES,), save_last_line, remove_folder),
    *requests((FILES,), read_latest, copy_latest, rename_latest, follows="file"),
)
