"""``python -m paceline.tools.auto``: the process of `paceline.tools.auto.planner_process`."""

from paceline.tools.auto.planner_process import main

if __name__ == "__main__":
    main()
