# To be sourced by the scripts beside this folder, which set `python` first.

# install PYTHON ARGUMENT...: `pip install` into an interpreter, by uv where `python` has it.
install() {
    into=$1
    shift
    if "$python" -c 'import uv' 2>/dev/null; then
        "$python" -m uv pip install --quiet --python "$into" "$@" && return
        echo "uv could not install $*; trying pip." >&2
    fi
    "$into" -m pip install --quiet --disable-pip-version-check "$@"
}
