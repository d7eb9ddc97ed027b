"""``python -m convert``, for systems on which another program is called ``convert``."""

from convert.cli import program

if __name__ == "__main__":
    program()
