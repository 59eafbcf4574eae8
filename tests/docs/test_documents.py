"""The documents say what is so: links lead somewhere, files and tests they name exist, commands they show parse, and the
configuration reference is what the code says."""

import re
from dataclasses import fields

import pytest
import typer

from livedraft.cli.config import field_documents, reference
from livedraft.cli.main import app
from livedraft.config import DistillConfig, DistillRunConfig, VllmConfig
from livedraft.settings import SECTIONS
from tests.docs.markdown import FILES, ROOT, Block, anchors, blocks, inline_code, links, links_of, words

by_file = pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
COMMAND = typer.main.get_command(app)
_PATH = re.compile(r"(?:docs|livedraft|tests|deploy|recipes|models|engine|learning|speculation|server|cli)/[\w./-]+")


@by_file
def test_links_lead_somewhere(file):
    for link in links(file):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{file.name}: {link}"


@by_file
def test_files_and_tests_that_are_named_exist(file):
    for code in inline_code(file):
        path, _, test = code.partition("::")
        if not _PATH.fullmatch(path):
            continue
        found = [folder / path for folder in (ROOT, ROOT / "livedraft") if (folder / path).exists()]
        assert found, f"{file.name} names {path}"
        if test:
            assert f"def {test}(" in found[0].read_text(encoding="utf-8"), f"{file.name} names {code}"


def verb_of(arguments):
    """(the command, what is left of the arguments). Raises a usage error for an unknown verb."""
    command, context = COMMAND, None
    while getattr(command, "commands", None):
        context = command.make_context("livedraft", list(arguments), parent=context)
        arguments = [*context._protected_args, *context.args]
        _, command, arguments = command.resolve_command(context, arguments)
    return command, context, arguments


def parse(command):
    """As the command line would, without running it."""
    arguments = words(command)
    while "=" in arguments[0] or arguments[0] in ("exec", "sudo"):
        arguments = arguments[1:]
    if arguments[0] == "torchrun":
        arguments = arguments[arguments.index("-m") + 1 :]
    if arguments[0] != "livedraft":
        return None
    arguments = (
        arguments[: arguments.index("--")] if "--" in arguments else arguments
    )  # the rest is for another program
    verb, context, rest = verb_of(arguments[1:])
    verb.make_context(verb.name, list(rest), parent=context)
    return verb


@by_file
def test_commands_that_are_shown_are_understood(file):
    for block in blocks(file):
        for command in block.commands:
            if "..." in command or "livedraft" not in command:
                continue
            try:
                parse(command)
            except Exception as error:
                pytest.fail(f"{file.name}, block at line {block.line}: {command}: {error}")


@by_file
def test_options_that_are_mentioned_exist(file):
    for code in inline_code(file):
        if not code.startswith("livedraft ") or "|" in code:
            continue
        names = code.split(" -- ")[0].split()[1:]
        command = COMMAND
        while names and names[0] in getattr(command, "commands", {}):
            command, names = command.commands[names[0]], names[1:]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if command is COMMAND:
            assert not names or names[0].startswith(("-", ".")), f"{file.name}: {code}"
        for name in names:
            option = name.split("=")[0]
            if option.startswith("--") and not getattr(command, "commands", None):
                assert option in known, f"{file.name}: {code}"


def test_the_checks_above_can_fail():
    with pytest.raises(Exception, match="srve"):
        parse("livedraft srve")
    with pytest.raises(Exception, match="--prot"):
        parse("livedraft serve --prot 1")
    with pytest.raises(Exception, match=r"version|VERSION"):
        parse("livedraft drafts show")
    assert parse("livedraft serve smollm2-135m  # a comment") is not None
    assert parse("curl http://x") is None
    assert Block(ROOT, 1, "python", "x = 1").commands == []
    shown = '[a](b.md) <source srcset="c.png, d.png 2x"> <img alt="e" src=\'f.png\' width="3"> <a href="g.md">h</a>'
    assert links_of(shown) == ["b.md", "c.png", "d.png", "f.png", "g.md"]
    assert "dashboard-dark.png" in links(ROOT / "docs" / "dashboard.md")
    assert sum(len(block.commands) for file in FILES for block in blocks(file)) > 40


def test_the_configuration_reference_is_fresh():
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference(), "docs/configuration.md is stale: make reference"


def test_every_setting_says_what_it_is():
    for kind in (*SECTIONS.values(), VllmConfig, DistillRunConfig, DistillConfig):
        documents = field_documents(kind)
        assert [one.name for one in fields(kind) if len(documents.get(one.name, "")) < 8] == []
