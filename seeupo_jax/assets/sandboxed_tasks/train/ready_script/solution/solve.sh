#!/bin/bash
set -eu
cd /app
cat > ready.sh <<'END'
#!/bin/bash
[ -e /app/flag ] || exit 1
echo ready
END
chmod +x ready.sh
