"""Do the hosts of a hostfile make a cluster? Asked before any MPI, with a limit on every question.

`probe` is a program of the standard library alone that is sent to every host over ssh; `link`
talks to it; `survey` asks all hosts at once; `judge` compares what they say; `show` prints it, and
`command` is ``python -m lockstep hosts``.
"""
