"""The command line. Each command has a module; `output` is the only one that prints."""

from convert.cli.app import main as main
from convert.cli.app import program as program
