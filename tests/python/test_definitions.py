# SPDX-License-Identifier: Apache-2.0
"""No class is defined twice here, and the checker sees those that are."""

import re
from pathlib import Path

import pytest
from helpers import definitions


def test_every_class_is_defined_in_one_file() -> None:
    assert definitions.check() == []


def in_pipeline(text: str) -> str:
    return f"namespace torch_sm3::pipeline {{\n{text}\n}} // namespace\n"


# How a class named Machine can be written so that other files see it.
SEEN = [
    "class Machine {\n public:\n  int x = 0;\n};",
    "struct TORCH_SM3_API Machine final : Base<int> { Machine(); };",
    "template <class T, int (*f)()>\nstruct Machine {};",
    "struct [[nodiscard]] alignas(8) Machine {};",
    "enum class Machine : uint8_t { kOne };",
    "enum Machine { kTwo };",
    "union Machine { int a; float b; };",
    "struct Machine; struct Machine\n{\n};",
    'const char* kText = R"({{)"; /* { */ // {\nstruct Machine {};',
    "char brace() { return '{'; }\nlong n = 1'000;\nclass Machine {};",
    "#define OPEN {\nint a[] = {1, 2};\nclass Machine {};",
    'extern "C" { int f(); }\nclass Machine {};',
    "inline namespace {INLINE} { } class Machine {};".replace("{INLINE}", "v1"),
]
# Where it is seen by nobody else, or is another.
UNSEEN = [
    "namespace {\nclass Machine {};\n}",
    "namespace {\nnamespace inner { class Machine {}; }\n}",
    "class Machine;",
    "using Machine = int;",
    "int f() { struct Machine {}; return 0; }",
    "struct Outer { struct Machine {}; };",
    "namespace other { class Machine {}; }",
    "template <>\nstruct Machine<int> {};",
    "struct Machine make() { return {}; }",
    "struct Machine* pointer() { return nullptr; }",
    "// class Machine {};\n/* class Machine {}; */",
    'const char* text = "class Machine {};";',
    "Machine::Machine() : x_{0} {}",
    "template <class Machine> void f() {}",
]


def write(root: Path, *texts: str) -> None:
    folder = root / "pipeline/src"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"f{i}.cpp").write_text(text)


@pytest.mark.parametrize("text", SEEN)
def test_two_definitions_are_named_with_their_places(tmp_path: Path, text: str) -> None:
    plain = in_pipeline("struct Machine {};")
    write(tmp_path, plain, in_pipeline(text), in_pipeline("class Other {};"))
    (problem,) = definitions.check(tmp_path)
    brace = re.search(r"Machine[^;{]*\{", text)
    assert brace
    line = 2 + text.count("\n", 0, brace.end())
    assert problem == (
        "torch_sm3::pipeline::Machine is defined in pipeline/src/f0.cpp:2 and "
        f"pipeline/src/f1.cpp:{line}"
    )


@pytest.mark.parametrize("text", UNSEEN)
def test_what_others_do_not_see_may_have_any_name(tmp_path: Path, text: str) -> None:
    write(tmp_path, in_pipeline("struct Machine {};"), in_pipeline(text))
    assert definitions.check(tmp_path) == []


def test_nested_classes_and_specialisations_clash_too(tmp_path: Path) -> None:
    nested = in_pipeline("class Outer::Inner { };")
    write(tmp_path, in_pipeline("struct Outer { struct Inner {}; };"), nested)
    (problem,) = definitions.check(tmp_path)
    assert problem.startswith("torch_sm3::pipeline::Outer::Inner is defined in")
    special = in_pipeline("template <> struct Traits<int, F<2>> {};")
    other = tmp_path / "other"
    write(other, special, special)
    (problem,) = definitions.check(other)
    assert problem.startswith("torch_sm3::pipeline::Traits<int,F<2>> is defined in")


def test_one_file_may_define_what_its_own_branches_choose(tmp_path: Path) -> None:
    either = "#if A\nclass Machine {};\n#else\nclass Machine {};\n#endif"
    write(tmp_path, in_pipeline(either))
    assert definitions.check(tmp_path) == []
