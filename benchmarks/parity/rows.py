"""Compare rows as ours and TRL tokenise them, token by token: ids, loss masks, labels, margins, rows left out.

    python benchmarks/parity/rows.py [--trl-python PATH] [--cases NAME ...] [--result FILE] [--record]
    python benchmarks/parity/rows.py --recorded trl-1.16.0-rows.json    # against TRL's recorded rows, without TRL

Exits with 1 if a row is neither the same nor different in the way that its case states (docs/concepts/trl.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import row_tokenizers
from cases import write
from ours_rows import encoded
from row_cases import CASES, SPECIAL, RowCase
from run import HERE, PEERS, execute

RECORDED = HERE / "trl-1.16.0-rows.json"
END = SPECIAL.index("<|im_end|>")
BEGIN = SPECIAL.index("<begin>")
Decode = Callable[[list[int]], str]


def unlike(case: RowCase, rlhf: dict[str, Any], trl: dict[str, Any] | None, decode: Decode) -> str:
    """How a row differs from what its case states; empty if it does not.

    Args:
        rlhf: ``sequences`` ([[ids, mask as 0s and 1s], ...]) and further values, or ``refused``.
        trl: the same, or None if the row was left out.
    """
    if trl is None or "refused" in rlhf:
        left_out = "too_long" if case.differs in (0, 4) else {7: "columns"}.get(case.differs, "bad_rows")
        if rlhf.get("refused") != left_out:
            return f"ours is {rlhf.get('refused', 'taken')}, TRL's {'left out' if trl is None else 'taken'}"
        if (trl is None) != (case.differs == 0):
            return "TRL takes it" if trl is not None else "TRL leaves it out"
        longest = 0 if trl is None else max(len(ids) for ids, _ in trl["sequences"])
        return "TRL does not cut it at the limit" if case.differs == 4 and longest != case.max_tokens else ""
    sequences, trl_sequences = rlhf["sequences"], trl["sequences"]
    values = [{name: value for name, value in side.items() if name != "sequences"} for side in (rlhf, trl)]
    if values[0] != values[1]:
        return f"values: ours {values[0]}, TRL's {values[1]}"
    if case.differs in (3, 4):  # mismatched answers are those of rows that differ
        sequences, trl_sequences = (
            sequences[: 2 if case.form == "pairs" else 1],
            trl_sequences[: 2 if case.form == "pairs" else 1],
        )
    problems = [_of_sequence(case, *pair, decode) for pair in zip(sequences, trl_sequences, strict=True)]
    if case.differs in (3, 7) and sequences == trl_sequences and case.form != "labels":
        return "nothing differs"
    return "; ".join(filter(None, problems))


def _of_sequence(case: RowCase, rlhf: list[Any], trl: list[Any], decode: Decode) -> str:
    """As :func:`unlike`, of one sequence."""
    (ids, mask), (trl_ids, trl_mask) = rlhf, trl
    if case.differs in (1, 2):
        extra, trained = trl_ids[len(ids) :], trl_mask[len(mask) :]
        ends = [END] if case.differs == 2 else []
        fine = trl_ids[: len(ids)] == ids and trl_mask.startswith(mask) and not trained.strip("1")
        fine = fine and extra[1:] == ends and decode(extra[:1]) == "\n"
    elif case.differs == 3:  # one text, cut into tokens otherwise, or with another first trained token
        fine = decode(ids) == decode(trl_ids) and (not mask or trl_mask.find("1") <= mask.find("1"))
    elif case.differs == 7:  # the text that two answers begin with is in TRL's prompt
        fine = ids == trl_ids and trl_mask.find("1") > mask.find("1")
    elif case.differs == 9:
        fine = trl_ids == [BEGIN, *ids] and trl_mask == "0" + mask
    else:
        fine = ids == trl_ids and mask == trl_mask
    return "" if fine else f"ours {ids} {mask}, TRL's {trl_ids} {trl_mask}"


def compare(rlhf: dict[str, Any], trl: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    """One row per case that was run: ``wrong`` is empty, or names the row and how it differs from what is stated."""
    from rlhf_runtime.data.tokenizer import decoder_of
    from transformers import AutoTokenizer

    verdicts = []
    for case in (case for case in CASES if case.name in rlhf):
        decode = decoder_of(AutoTokenizer.from_pretrained(str(work / case.tokenizer)))
        pairs = enumerate(zip(rlhf[case.name], trl[case.name], strict=True))
        wrong = [(n, unlike(case, a, b, decode)) for n, (a, b) in pairs]
        text = "; ".join(f"row {n}: {problem}" for n, problem in wrong if problem)
        verdicts.append({"case": case.name, "rows": len(case.rows), "differs": case.differs, "wrong": text})
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, default=PEERS / "bin/python", help="Python that has TRL 1.16.0")
    parser.add_argument("--recorded", type=Path, help="file of --record to compare with in place of running TRL")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="all where absent")
    parser.add_argument("--result", type=Path, help="JSON file to write: the verdict on each case")
    parser.add_argument("--record", action="store_true", help=f"write TRL's rows to {RECORDED.name}, which tests read")
    arguments = parser.parse_args()
    if arguments.recorded is None and not arguments.trl_python.exists():
        sys.exit(f"{arguments.trl_python} does not exist: name a Python that has TRL 1.16.0 with --trl-python")
    if arguments.record and (arguments.recorded or arguments.cases):
        sys.exit("--record writes what TRL says of all cases: leave out --recorded and --cases")
    with tempfile.TemporaryDirectory() as folder:
        work, chosen = Path(folder), ["--cases", *arguments.cases] if arguments.cases else []
        row_tokenizers.make(work)
        rlhf = {case.name: encoded(case, work) for case in CASES if case.name in (arguments.cases or [case.name])}
        file = arguments.recorded or work / "trl.json"
        if arguments.recorded is None:
            execute(sys.executable, "tiny.py", folder)
            execute(str(arguments.trl_python), "trl_rows.py", "--work", folder, "--result", str(file), *chosen)
        trl = json.loads(file.read_text())
        verdicts = compare(rlhf, trl["cases"], work)
    if arguments.record:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in trl["cases"].items())
        RECORDED.write_text(f'{{\n "versions": {json.dumps(trl["versions"])},\n "cases": {{\n{lines}\n }}\n}}\n')
    if arguments.result:
        write(arguments.result, verdicts)
    for verdict in verdicts:
        outcome = f"as stated in {verdict['differs']}" if verdict["differs"] else "the same"
        print(f"{verdict['case']:28} {verdict['rows']} rows  {verdict['wrong'] or outcome}")
    if any(verdict["wrong"] for verdict in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
