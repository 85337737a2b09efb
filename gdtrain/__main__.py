"""python -m gdtrain: the same as the gdtrain command."""

from gdtrain.cli import main

main()
