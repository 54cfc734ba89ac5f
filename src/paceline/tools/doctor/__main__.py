"""The script that ``paceline doctor`` launches on every worker: calls `measure.main`."""

from paceline.tools.doctor.measure import main

if __name__ == "__main__":
    main()
