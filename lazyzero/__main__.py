"""python -m lazyzero"""

from lazyzero.cli import program

program()
