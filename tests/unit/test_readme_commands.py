import pytest
from readme_commands import Commands, ReadmeError, extract

DEMO = "python3 -m venv .venv && .venv/bin/aiodelay demo"
TESTS = "python3 -m venv .venv && .venv/bin/nox -s tests"


def block(body: str, language: str = "sh") -> str:
    return f"Some words.\n\n```{language}\n{body}\n```\n"


def readme(*blocks: str, heading: str = "## Two commands") -> str:
    return f"# aiodelay\n\n{block('pip install x')}\n{heading}\n\n{''.join(blocks)}\n## Next\n\n{block('ls')}"


def test_commands_come_in_the_readmes_order() -> None:
    assert extract(readme(block(DEMO), block(TESTS))) == Commands(demo=DEMO, tests=TESTS)


def test_the_section_may_end_the_file() -> None:
    text = readme(block(DEMO), block(TESTS)).partition("## Next")[0]
    assert extract(text) == Commands(DEMO, TESTS)


def test_a_subheading_does_not_end_the_section() -> None:
    assert extract(readme(block(DEMO), "### All tests\n\n", block(TESTS))) == Commands(DEMO, TESTS)


def test_blocks_in_other_languages_do_not_count() -> None:
    assert extract(readme(block(DEMO), block("1 + 1", "python"), block(TESTS))) == Commands(DEMO, TESTS)


def test_space_around_a_line_is_dropped() -> None:
    assert extract(readme(block(f"  {DEMO} "), block(TESTS))).demo == DEMO


@pytest.mark.parametrize("n", [0, 1, 3])
def test_any_other_number_of_blocks_is_refused(n: int) -> None:
    with pytest.raises(ReadmeError, match=f"holds {n} ```sh blocks; it must hold exactly two"):
        extract(readme(*[block(DEMO)] * n))


@pytest.mark.parametrize("body", ["", " ", f"{DEMO}\n{TESTS}", f"{DEMO} \\\n --seconds 5"])
def test_a_block_of_any_other_number_of_lines_is_refused(body: str) -> None:
    with pytest.raises(ReadmeError, match="must hold exactly one line"):
        extract(readme(block(body), block(TESTS)))


def test_a_missing_section_is_refused() -> None:
    with pytest.raises(ReadmeError, match="0 sections are headed '## Two commands'"):
        extract(readme(block(DEMO), block(TESTS), heading="## Commands"))


def test_a_second_section_is_refused() -> None:
    text = readme(block(DEMO), block(TESTS))
    with pytest.raises(ReadmeError, match="2 sections are headed"):
        extract(text + "\n" + text)
