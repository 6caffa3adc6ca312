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

# install_torch PYTHON: PyTorch's CPU build into an interpreter, by pip, which goes on where one of
# several places that may have this wheel is out of reach.
install_torch() {
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --retries 1 \
        --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
}
