"""A stalled worker is named even where the disk takes no report."""

from pathlib import Path

from rlhf_workers.driver.stall_report import StallReport


class Named:
    name, location = "policy rank 1", "node 127.0.0.1, pid 5"


class Report(StallReport):
    def page(self):
        return "its stacks"


def test_a_report_that_cannot_be_written_is_in_the_message(tmp_path):
    report = Report(None, Named(), "policy.save()", 7.0, False, [])
    assert Path(report.write(tmp_path)).read_text() == "its stacks"
    folder = tmp_path / "file"
    folder.touch()
    text = report.write(folder)
    assert "stall-policy-1.txt cannot be written ([Errno" in text
    assert text.endswith(". Its content is:\nits stacks")
