"""Reading of shell scripts: words, variables, arrays, texts below a line; nothing is executed."""

import pytest
from rlhf.errors import ConfigError
from rlhf_cli.migrate.shell import commands, known_text

SCRIPT = r"""#!/bin/bash
set -x   # a comment with a 'quote
HERE="$(cd "$(dirname "$0")/.." && pwd)"
MODEL='a model' ; export RATE=1e-6
OUT="${OUT_DIR:-runs}/$MODEL"
ARGS=(
   --model "$MODEL"   # not this one
   # --gone 1
   --rate ${RATE}
)
ARGS+=(--more)
read -r -d '' command <<EOF
tool.train \
   --text "$MODEL" --one
EOF
for size in 1 2; do python -m tool.train "${ARGS[@]}" --out $OUT --size $size 2>&1 | tee log; done
run --module $command && bash -c "cd x; tool.train --rate $RATE"
python -m tool.train --here $HERE/x --plain '$MODEL' --line $'a\nb' \
    --last &>> log
"""


def words(text, variables=None):
    return [[word.text for word in command] for command in commands(text, "run.sh", variables or {})]


def test_words_variables_arrays_and_texts_are_read():
    _set, *_, loop, tee, _done, module, bash, last = words(SCRIPT)
    assert _set == ["set", "-x"]
    ends = ["--model", "a model", "--rate", "1e-6", "--more", "--out", "runs/a", "model"]
    assert loop == ["do", "python", "-m", "tool.train", *ends, "--size", "\0size\0"]
    assert tee == ["tee", "log"]
    assert module == ["run", "--module", "tool.train", "--text", '"a', 'model"', "--one"], "as a shell splits it"
    assert bash == ["bash", "-c", "cd x; tool.train --rate 1e-6"]
    assert last[3:] == ["--here", "\0HERE\0/x", "--plain", "$MODEL", "--line", "a\nb", "--last"]


def test_values_that_are_given_replace_those_of_the_script():
    *_, last = words(SCRIPT, {"HERE": "/home", "MODEL": "other"})
    assert last[4] == "/home/x"


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nb 'c\n", "line 2"), ("a\nX=(1\n2", "line 2"), ("read X <<END\n1\n", "line 2"), ('ok\n\necho "$(', "line 3")],
)
def test_what_is_not_closed_is_refused_with_its_line(text, line):
    with pytest.raises(ConfigError, match=line):
        words(text)


def test_an_unknown_variable_is_refused_only_where_it_is_needed():
    [[_, word]] = commands("echo $WHERE/x", "run.sh", {})
    with pytest.raises(ConfigError, match=r"line 1: '\$WHERE/x'.*--set WHERE=VALUE"):
        known_text(word, "run.sh")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=1; if [ x = y ]; then A=2; fi; run $A", "1"),
        ("A=1\nif [ x = y ]; then\n A=2\nelif [[ ab == a* ]]; then\n A=3\nelse\n A=4\nfi\nrun $A", "3"),
        ("A=1; if [ -f file ]; then A=2; fi; run $A", "\0A\0"),
        ("A=1; if [ -f file ]; then A=1; fi; run $A", "1"),
        ("D=${D:-$(cmd)}\nA=()\ncase $D in\n x) A=(1) ;;\n *) A=(2) ;;\nesac\nrun ${A[@]}", "\0A\0"),
        ("D=b; case $D in\n a | b) A=1\n ;;\n *) A=2 ;;\nesac; run $A", "1"),
        ('D=b; E=c; if [ "$D" != a ] && { [ "$E" = x ] || [ "$E" = c ]; }; then A=1; else A=2; fi; run $A', "1"),
        ('D=; [ -z "$D" ] && A=1; [ -n "$D" ] && A=2; run $A', "1"),
        ("A=1; if [ x = x ]; then if [ x = y ]; then A=2; fi; else A=3; fi; run $A", "1"),
        ("if [ 2 -gt 1 ]; then run 1; else run 2; fi", "1"),
        ("N=3; L=$((1024 * 2)); run $(( (L + N + 1) / 2 ))", "1026"),
        ("L=$((1024 * $UNKNOWN)); run $L", "\0UNKNOWN\0"),
        ("A=; run ${A:-x_${B:-$(date)}_${C:-3}}", "x_\0(command)\0_3"),
        ('A="${B:-"/root"}/x"; run $A', "/root/x"),
        ("A=${A:-'x'}/${B:-\"['y']\"}/${C-'$HOME'}; run $A", "x/['y']/$HOME"),
        ("A=\"${A:-'x'}\"; run $A", "'x'"),
        ("A=(1 2); run ${#A[@]}", "2"),
        ("A=$((2 * $(( $((1 + 1)) * 2 )) )); run $A", "8"),
        ("A=2; run $[$A * 3]", "6"),
        ("A=1; run x${A:+-$A}${B:+-2}", "x-1"),
        ("A=x; A+=y; run $A", "xy"),
        ("A=1; [ -f file ] && A+=2; run $A", "\0A\0"),
        ("for A in 1; do B=1; B+=2; done; run $B", "12"),
        ("A=1; for A in 1 2; do run; done; run $A", "\0A\0"),
        ("A=1; read -r A; run $A", "\0A\0"),
        ("A=2; ((A += 1)); run $A", "\0A\0"),
        ("A=1; (( 2 > 3 )) && A=2; run $A", "\0A\0"),
        ("A=1; ! [ -f file ] && A=2; run $A", "\0A\0"),
        ("A=1; false && A=2; run $A", "1"),
        ("A=1; [ -f file ] && [ 1 = 1 ] && A=2; run $A", "\0A\0"),
        ("A=1; [ -f file ] || [ 1 = 2 ] && A=2; run $A", "\0A\0"),
        ("A=1; [[ -z x && 2 -ge 1 ]] && A=2; run $A", "1"),
        ("A=1; [[ -z x || 2 -ge 1 ]] && A=2; run $A", "2"),
        ('A="x=y"; [[ -z 1 || "$A" == z ]] && B=1; run $A', "x=y"),
        (": ${A:=1}; run ${A:-2}", "1"),
        ('A=(1 2); run "${A[*]}"', "1 2"),
        ("A=$B; run ${A:+1}", "\0B\0"),
        ("A=; run ${A+1}", "1"),
        ("A=(1 $B); run ${#A[@]}", "\0B\0"),
        ("run 1 \\", "1"),
    ],
)
def test_conditions_and_sums(script, expected):
    assert words(script)[-1][-1] == expected


def test_an_assignment_is_one_word_with_all_that_a_variable_holds():
    assert words('A="--a 1"; B=$A; export C=$B" --c"; run $C') == [["run", "--a", "1", "--c"]]


def test_an_empty_array_is_no_word_and_the_home_is_that_of_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert words('A=(\n)\nrun "${A[@]}" $HOME/x') == [["run", "/home/me/x"]]


def test_a_quote_that_is_not_closed_takes_no_exponential_time():
    """Without the possessive quantifier these 40 commands are read in 2**40 ways."""
    with pytest.raises(ConfigError, match="not closed"):
        words('python "' + "$(a) " * 40)
