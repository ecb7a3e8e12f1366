#!/bin/sh
# The Python of Spark's processes on this machine: see worker_python.py.
kept=
separator=$IFS
IFS=:
for place in $PYTHONPATH; do
    case $place in
        */python/lib/pyspark.zip | */python/lib/py4j-*-src.zip) ;;
        *) kept=${kept:+$kept:}$place ;;
    esac
done
IFS=$separator
PYTHONPATH=$kept
export PYTHONPATH
exec "$PYSPARK_INSTALLED_PYTHON" "$@"
