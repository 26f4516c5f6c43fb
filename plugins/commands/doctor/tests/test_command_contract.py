"""The suite of commands, for the commands of this distribution."""

from rlhf_plugin_doctor.command import Doctor
from rlhf_testing.command import CommandContract


class TestDoctor(CommandContract):
    command = Doctor
